//go:build cgo && linux && (amd64 || arm64)

// A libllama is loaded at run time, so that nothing of it is needed to build. The prototypes are those of its public interface.
//
// Two of its structures go by value and change between releases: the parameters of a model and of a context. Both are larger than
// 16 bytes, so that the calling conventions of amd64 and arm64 pass a copy in memory, of which the callee reads its own prefix.
// They are blocks of 512 bytes here, filled by the library's own defaults. Of a context's parameters only the first four numbers
// are set, and only after their defaults were found where they have always been.

#include "shim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned char b[512]; } model_params;
typedef struct { uint32_t head[4]; unsigned char rest[496]; } context_params;
typedef struct { unsigned char b[256]; } batch;

struct hfl_library {
	void (*backend_init)(void);
	void (*log_set)(void (*)(int, const char *, void *), void *);
	const char *(*version)(void); // absent before release 0.5
	model_params (*model_default_params)(void);
	void *(*model_load_from_file)(const char *, model_params);
	void (*model_free)(void *);
	const void *(*model_get_vocab)(const void *);
	int32_t (*model_n_layer)(const void *);
	int32_t (*model_n_swa)(const void *);
	int32_t (*model_n_ctx_train)(const void *);
	bool (*model_is_recurrent)(const void *);
	bool (*model_is_hybrid)(const void *);
	int32_t (*model_meta_val_str)(const void *, const char *, char *, size_t);
	int32_t (*vocab_n_tokens)(const void *);
	int (*vocab_type)(const void *);
	bool (*vocab_is_eog)(const void *, int32_t);
	int32_t (*tokenize)(const void *, const char *, int32_t, int32_t *, int32_t, bool, bool);
	int32_t (*token_to_piece)(const void *, int32_t, char *, int32_t, int32_t, bool);
	void *(*adapter_lora_init)(void *, const char *);
	int32_t (*set_adapters_lora)(void *, void **, size_t, float *); // one of these two
	int32_t (*set_adapter_lora)(void *, void *, float);
	context_params (*context_default_params)(void);
	void *(*init_from_model)(void *, context_params);
	void (*free)(void *);
	void (*set_n_threads)(void *, int32_t, int32_t);
	batch (*batch_get_one)(int32_t *, int32_t);
	int32_t (*decode)(void *, batch);
	float *(*get_logits_ith)(void *, int32_t);
	void *(*get_memory)(const void *);
	bool (*memory_seq_rm)(void *, int32_t, int32_t, int32_t);
	void (*memory_clear)(void *, bool);
	int32_t (*memory_seq_pos_max)(void *, int32_t);
	size_t (*state_seq_get_size_ext)(void *, int32_t, uint32_t);
	size_t (*state_seq_get_data_ext)(void *, uint8_t *, size_t, int32_t, uint32_t);
	size_t (*state_seq_set_data_ext)(void *, const uint8_t *, size_t, int32_t, uint32_t);
};

static pthread_mutex_t words_mutex = PTHREAD_MUTEX_INITIALIZER;
static char words[512]; // the last warning or error that the library logged; guarded by words_mutex

static void keep_words(int level, const char *text, void *unused) {
	(void)unused;
	if (level != 3 && level != 4) return; // warning, error
	pthread_mutex_lock(&words_mutex);
	snprintf(words, sizeof words, "%s", text);
	pthread_mutex_unlock(&words_mutex);
}

int hfl_last_words(char *to, size_t size) {
	pthread_mutex_lock(&words_mutex);
	int n = snprintf(to, size, "%s", words);
	words[0] = 0;
	pthread_mutex_unlock(&words_mutex);
	return n;
}

static char *said(const char *a, const char *b) {
	size_t n = strlen(a) + strlen(b) + 1;
	char *s = malloc(n);
	if (s) snprintf(s, n, "%s%s", a, b);
	return s;
}

hfl_library *hfl_open(const char *path, const char *directory, char **why) {
	void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!handle) {
		*why = said(dlerror(), "");
		return NULL;
	}
	hfl_library *l = calloc(1, sizeof *l);
	if (!l) {
		*why = said("out of memory", "");
		return NULL;
	}
	const char *missing = NULL;
#define OPTIONAL(name) *(void **)&l->name = dlsym(handle, "llama_" #name)
#define NEED(name) if (!(OPTIONAL(name)) && !missing) missing = "llama_" #name
	NEED(backend_init); NEED(log_set); NEED(model_default_params); NEED(model_load_from_file); NEED(model_free); NEED(model_get_vocab);
	NEED(model_n_layer); NEED(model_n_swa); NEED(model_n_ctx_train); NEED(model_is_recurrent); NEED(model_is_hybrid);
	NEED(model_meta_val_str); NEED(vocab_n_tokens); NEED(vocab_type); NEED(vocab_is_eog); NEED(tokenize); NEED(token_to_piece);
	NEED(adapter_lora_init); NEED(context_default_params); NEED(init_from_model); NEED(free); NEED(set_n_threads);
	NEED(batch_get_one); NEED(decode); NEED(get_logits_ith); NEED(get_memory); NEED(memory_seq_rm); NEED(memory_clear);
	NEED(memory_seq_pos_max); NEED(state_seq_get_size_ext); NEED(state_seq_get_data_ext); NEED(state_seq_set_data_ext);
	OPTIONAL(version); OPTIONAL(set_adapters_lora); OPTIONAL(set_adapter_lora);
	if (missing) {
		*why = said("it has no function ", missing);
		free(l);
		return NULL; // the library stays loaded: others may use it
	}
	context_params p = l->context_default_params();
	if (p.head[0] != 512 || p.head[1] != 2048 || p.head[2] != 512 || p.head[3] != 1) {
		char found[128];
		snprintf(found, sizeof found, "%u, %u, %u, %u", p.head[0], p.head[1], p.head[2], p.head[3]);
		*why = said("the parameters of a context begin with other defaults than 512, 2048, 512, 1: ", found);
		free(l);
		return NULL;
	}
	l->log_set(keep_words, NULL);
	// Back ends are libraries of their own beside it, in some builds.
	void (*load_all)(const char *);
	if ((*(void **)&load_all = dlsym(handle, "ggml_backend_load_all_from_path"))) load_all(directory);
	l->backend_init();
	return l;
}

const char *hfl_version(hfl_library *l) { return l->version ? l->version() : ""; }

void *hfl_model_load(hfl_library *l, const char *path) { return l->model_load_from_file(path, l->model_default_params()); }
void hfl_model_free(hfl_library *l, void *model) { l->model_free(model); }

int32_t hfl_model_number(hfl_library *l, void *model, int what) {
	switch (what) {
	case HFL_VOCABULARY: return l->vocab_n_tokens(l->model_get_vocab(model));
	case HFL_LAYERS: return l->model_n_layer(model);
	case HFL_WINDOW: return l->model_n_swa(model);
	case HFL_RECURRENT: return l->model_is_recurrent(model);
	case HFL_HYBRID: return l->model_is_hybrid(model);
	case HFL_CONTEXT: return l->model_n_ctx_train(model);
	case HFL_TOKENIZER: return l->vocab_type(l->model_get_vocab(model)) != 0;
	}
	return -1;
}

int32_t hfl_model_text(hfl_library *l, void *model, const char *key, char *buf, size_t size) {
	return l->model_meta_val_str(model, key, buf, size);
}

void *hfl_adapter_load(hfl_library *l, void *model, const char *path) { return l->adapter_lora_init(model, path); }

void *hfl_context_new(hfl_library *l, void *model, uint32_t n_ctx, uint32_t n_batch, uint32_t n_seq_max, int32_t threads) {
	context_params p = l->context_default_params();
	p.head[0] = n_ctx;
	p.head[1] = n_batch;
	p.head[2] = n_batch;
	p.head[3] = n_seq_max;
	void *c = l->init_from_model(model, p);
	if (c) l->set_n_threads(c, threads, threads);
	return c;
}

int hfl_context_adapter(hfl_library *l, void *context, void *adapter) {
	float scale = 1;
	if (l->set_adapters_lora) return l->set_adapters_lora(context, &adapter, 1, &scale);
	if (l->set_adapter_lora) return l->set_adapter_lora(context, adapter, scale);
	return -1;
}

void hfl_context_free(hfl_library *l, void *context) { l->free(context); }

int hfl_decode(hfl_library *l, void *context, int32_t *tokens, int32_t count) {
	return l->decode(context, l->batch_get_one(tokens, count));
}

float *hfl_logits(hfl_library *l, void *context) { return l->get_logits_ith(context, -1); }

size_t hfl_state_size(hfl_library *l, void *context, uint32_t flags) { return l->state_seq_get_size_ext(context, 0, flags); }

size_t hfl_state_get(hfl_library *l, void *context, void *to, size_t size, uint32_t flags) {
	return l->state_seq_get_data_ext(context, to, size, 0, flags);
}

size_t hfl_state_set(hfl_library *l, void *context, const void *from, size_t size, uint32_t flags) {
	return l->state_seq_set_data_ext(context, from, size, 0, flags);
}

int hfl_cut(hfl_library *l, void *context, int32_t from) { return l->memory_seq_rm(l->get_memory(context), 0, from, -1); }
void hfl_clear(hfl_library *l, void *context) { l->memory_clear(l->get_memory(context), true); }
int32_t hfl_last(hfl_library *l, void *context) { return l->memory_seq_pos_max(l->get_memory(context), 0); }

int32_t hfl_tokenize(hfl_library *l, void *model, const char *text, int32_t length, int32_t *to, int32_t max, int begins) {
	return l->tokenize(l->model_get_vocab(model), text, length, to, max, begins, true);
}

int32_t hfl_piece(hfl_library *l, void *model, int32_t token, char *to, int32_t max) {
	return l->token_to_piece(l->model_get_vocab(model), token, to, max, 0, false);
}

int hfl_is_end(hfl_library *l, void *model, int32_t token) { return l->vocab_is_eog(l->model_get_vocab(model), token); }
