#include <stddef.h>
#include <stdint.h>

// What the shim needs of a loaded libllama. Handles are opaque pointers, errors are texts that the caller frees.

typedef struct hfl_library hfl_library;

hfl_library *hfl_open(const char *path, const char *directory, char **why);
const char *hfl_version(hfl_library *l);

void *hfl_model_load(hfl_library *l, const char *path);
void hfl_model_free(hfl_library *l, void *model);
int32_t hfl_model_number(hfl_library *l, void *model, int what);
int32_t hfl_model_text(hfl_library *l, void *model, const char *key, char *buf, size_t size);
void *hfl_adapter_load(hfl_library *l, void *model, const char *path);

void *hfl_context_new(hfl_library *l, void *model, uint32_t n_ctx, uint32_t n_batch, uint32_t n_seq_max, int32_t threads);
int hfl_context_adapter(hfl_library *l, void *context, void *adapter);
void hfl_context_free(hfl_library *l, void *context);
int hfl_decode(hfl_library *l, void *context, int32_t *tokens, int32_t count);
float *hfl_logits(hfl_library *l, void *context);

size_t hfl_state_size(hfl_library *l, void *context, uint32_t flags);
size_t hfl_state_get(hfl_library *l, void *context, void *to, size_t size, uint32_t flags);
size_t hfl_state_set(hfl_library *l, void *context, const void *from, size_t size, uint32_t flags);

int hfl_cut(hfl_library *l, void *context, int32_t from);
void hfl_clear(hfl_library *l, void *context);
int32_t hfl_last(hfl_library *l, void *context);

int32_t hfl_tokenize(hfl_library *l, void *model, const char *text, int32_t length, int32_t *to, int32_t max, int begins);
int32_t hfl_piece(hfl_library *l, void *model, int32_t token, char *to, int32_t max);
int hfl_is_end(hfl_library *l, void *model, int32_t token);

int hfl_last_words(char *to, size_t size);

enum { HFL_VOCABULARY, HFL_LAYERS, HFL_WINDOW, HFL_RECURRENT, HFL_HYBRID, HFL_CONTEXT, HFL_TOKENIZER };
