package gguf

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/holdfast-db/holdfast/txn"
)

// Vocabulary is the number of tokens of every tiny model.
const Vocabulary = 512

// Window is the attention window of the gemma3 model, in tokens.
const Window = 256

// Options of Tiny.
type Options struct {
	Seed uint64 // of the weights
	Text bool   // with a tokenizer: the bytes, and a few English words; without one token ids are all there is
}

// builder fills a File for one architecture.
type builder struct {
	*File
	arch string
	r    *rand.Rand
}

var builders = map[string]func(b *builder){
	"llama": (*builder).llama, "mamba2": (*builder).mamba2, "qwen35": (*builder).qwen35, "granitehybrid": (*builder).granitehybrid, "gemma3": (*builder).gemma3,
}

// Architectures gives the names that Tiny knows, sorted.
func Architectures() []string { return slices.Sorted(maps.Keys(builders)) }

// Tiny makes a model of about a million random weights: llama (attention), mamba2 (recurrent), qwen35 (three layers of gated delta net and
// one of attention), granitehybrid (mamba and attention by turns), gemma3 (attention, in five of six layers within a window).
func Tiny(arch string, o Options) (*File, error) {
	build := builders[arch]
	if build == nil {
		return nil, fmt.Errorf("gguf: no tiny model %.40q: want one of %v: %w", arch, Architectures(), txn.ErrInvalid)
	}
	b := &builder{File: &File{}, arch: arch, r: rand.New(rand.NewPCG(o.Seed, 0x9e3779b97f4a7c15))}
	b.set("general.architecture", arch)
	b.set("general.name", "tiny-"+arch)
	b.tokenizer(o.Text)
	b.key("vocab_size", uint32(Vocabulary))
	b.key("context_length", uint32(8192))
	build(b)
	return b.File, nil
}

// key sets a value of the architecture.
func (b *builder) key(name string, value any) { b.set(b.arch+"."+name, value) }

// add adds a tensor whose values fill gives.
func (b *builder) add(name string, fill func() float32, shape ...int) {
	n := 1
	for _, d := range shape {
		n *= d
	}
	data := make([]float32, n)
	for i := range data {
		data[i] = fill()
	}
	b.tensors = append(b.tensors, tensor{name, shape, data})
}

// matrix adds a random matrix that takes in numbers and gives out, and keeps their size.
func (b *builder) matrix(name string, in, out int) {
	scale := 1 / math.Sqrt(float64(in))
	b.add(name, func() float32 { return float32(b.r.NormFloat64() * scale) }, in, out)
}

// ones adds the weights of a norm.
func (b *builder) ones(name string, n ...int) { b.add(name, func() float32 { return 1 }, n...) }

func (b *builder) between(lo, hi float64) func() float32 {
	return func() float32 { return float32(lo + (hi-lo)*b.r.Float64()) }
}

const (
	width   = 128 // numbers a token
	hidden  = 256 // of the feed-forward network
	heads   = 4
	headsKV = 2
	headDim = 32
)

func (b *builder) common(layers int) {
	b.key("block_count", uint32(layers))
	b.key("embedding_length", uint32(width))
	b.key("feed_forward_length", uint32(hidden))
	b.key("attention.layer_norm_rms_epsilon", float32(1e-5))
	b.matrix("token_embd.weight", width, Vocabulary)
	b.ones("output_norm.weight", width)
}

func (b *builder) attentionKeys(kv any, dim int) {
	b.key("attention.head_count", uint32(heads))
	b.key("attention.head_count_kv", kv)
	b.key("attention.key_length", uint32(dim))
	b.key("attention.value_length", uint32(dim))
	b.key("rope.dimension_count", uint32(dim))
	b.key("rope.freq_base", float32(10000))
}

// attention adds q, k, v and o; a gated q has twice the numbers.
func (b *builder) attention(l string, kv, dim, gated int) {
	b.matrix(l+"attn_q.weight", width, heads*dim*gated)
	b.matrix(l+"attn_k.weight", width, kv*dim)
	b.matrix(l+"attn_v.weight", width, kv*dim)
	b.matrix(l+"attn_output.weight", heads*dim, width)
}

func (b *builder) feedForward(l string) {
	b.matrix(l+"ffn_gate.weight", width, hidden)
	b.matrix(l+"ffn_up.weight", width, hidden)
	b.matrix(l+"ffn_down.weight", hidden, width)
}

func layer(i int) string { return fmt.Sprintf("blk.%d.", i) }

func (b *builder) llama() {
	b.attentionKeys(uint32(headsKV), headDim)
	b.common(4)
	b.matrix("output.weight", width, Vocabulary)
	for i := range 4 {
		l := layer(i)
		b.ones(l+"attn_norm.weight", width)
		b.attention(l, headsKV, headDim, 1)
		b.ones(l+"ffn_norm.weight", width)
		b.feedForward(l)
	}
}

// Sizes of the recurrent layers.
const (
	inner     = 256
	stateDim  = 16
	ssmHeads  = 8
	ssmGroups = 1
	kernel    = 4
)

func (b *builder) mambaKeys() {
	b.key("ssm.conv_kernel", uint32(kernel))
	b.key("ssm.inner_size", uint32(inner))
	b.key("ssm.state_size", uint32(stateDim))
	b.key("ssm.time_step_rank", uint32(ssmHeads))
	b.key("ssm.group_count", uint32(ssmGroups))
}

func (b *builder) mamba(l string) {
	conv := inner + 2*ssmGroups*stateDim
	b.matrix(l+"ssm_in.weight", width, 2*inner+2*ssmGroups*stateDim+ssmHeads)
	b.add(l+"ssm_conv1d.weight", b.between(-0.5, 0.5), kernel, conv)
	b.add(l+"ssm_conv1d.bias", b.between(-0.1, 0.1), conv)
	b.add(l+"ssm_dt.bias", b.between(-4, -1), ssmHeads)
	b.add(l+"ssm_a", b.between(-2, -0.1), 1, ssmHeads)
	b.add(l+"ssm_d", b.between(0.5, 1), 1, ssmHeads)
	b.ones(l+"ssm_norm.weight", inner/ssmGroups, ssmGroups)
	b.matrix(l+"ssm_out.weight", inner, width)
}

func (b *builder) mamba2() {
	b.mambaKeys()
	b.common(4)
	b.matrix("output.weight", width, Vocabulary)
	for i := range 4 {
		b.ones(layer(i)+"attn_norm.weight", width)
		b.mamba(layer(i))
	}
}

func (b *builder) granitehybrid() {
	b.mambaKeys()
	b.attentionKeys([]int32{0, headsKV, 0, headsKV}, headDim)
	b.key("attention.scale", float32(1/math.Sqrt(headDim)))
	b.key("embedding_scale", float32(1))
	b.key("residual_scale", float32(1))
	b.key("logit_scale", float32(1))
	b.common(4)
	b.matrix("output.weight", width, Vocabulary)
	for i := range 4 {
		l := layer(i)
		b.ones(l+"attn_norm.weight", width)
		if i%2 == 0 {
			b.mamba(l)
		} else {
			b.attention(l, headsKV, headDim, 1)
		}
		b.ones(l+"ffn_norm.weight", width)
		b.feedForward(l)
	}
}

func (b *builder) qwen35() {
	const (
		keyHeads, valueHeads = 2, 4
		dim                  = 32
		keys, values         = keyHeads * dim, valueHeads * dim
	)
	b.key("ssm.conv_kernel", uint32(kernel))
	b.key("ssm.inner_size", uint32(values))
	b.key("ssm.state_size", uint32(dim))
	b.key("ssm.time_step_rank", uint32(valueHeads))
	b.key("ssm.group_count", uint32(keyHeads))
	b.key("full_attention_interval", uint32(4))
	b.attentionKeys(uint32(headsKV), headDim)
	b.key("rope.dimension_sections", []int32{8, 4, 4, 0})
	b.common(4)
	b.matrix("output.weight", width, Vocabulary)
	for i := range 4 {
		l := layer(i)
		b.ones(l+"attn_norm.weight", width)
		if i%4 != 3 {
			b.matrix(l+"attn_qkv.weight", width, 2*keys+values)
			b.matrix(l+"attn_gate.weight", width, values)
			b.add(l+"ssm_conv1d.weight", b.between(-0.5, 0.5), kernel, 2*keys+values)
			b.add(l+"ssm_dt.bias", b.between(-4, -1), valueHeads)
			b.add(l+"ssm_a", b.between(-2, -0.1), valueHeads)
			b.matrix(l+"ssm_beta.weight", width, valueHeads)
			b.matrix(l+"ssm_alpha.weight", width, valueHeads)
			b.ones(l+"ssm_norm.weight", dim)
			b.matrix(l+"ssm_out.weight", values, width)
		} else {
			b.attention(l, headsKV, headDim, 2)
			b.ones(l+"attn_q_norm.weight", headDim)
			b.ones(l+"attn_k_norm.weight", headDim)
		}
		b.ones(l+"post_attention_norm.weight", width)
		b.feedForward(l)
	}
}

func (b *builder) gemma3() {
	b.attentionKeys(uint32(headsKV), headDim)
	b.key("attention.sliding_window", uint32(Window))
	b.common(6)
	for i := range 6 {
		l := layer(i)
		b.ones(l+"attn_norm.weight", width)
		b.attention(l, headsKV, headDim, 1)
		b.ones(l+"attn_q_norm.weight", headDim)
		b.ones(l+"attn_k_norm.weight", headDim)
		b.ones(l+"post_attention_norm.weight", width)
		b.ones(l+"ffn_norm.weight", width)
		b.feedForward(l)
		b.ones(l+"post_ffw_norm.weight", width)
	}
}

var tinyWords = []string{
	"the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he", "his", "but",
	"at", "are", "this", "have", "from", "which", "or", "had", "an", "they", "you", "were", "their", "one", "all", "we", "can", "her",
}

// tokenizer writes either no tokenizer or one of 512 pieces: three control tokens, the 256 bytes, words, and unused ones.
func (b *builder) tokenizer(text bool) {
	if !text {
		b.set("tokenizer.ggml.model", "none")
		return
	}
	const normal, unknown, control, unused, byteToken = 1, 2, 3, 5, 6
	pieces := []string{"<unk>", "<s>", "</s>"}
	types := []int32{unknown, control, control}
	for i := range 256 {
		pieces = append(pieces, fmt.Sprintf("<0x%02X>", i))
		types = append(types, byteToken)
	}
	add := func(s string) {
		if !slices.Contains(pieces, s) {
			pieces = append(pieces, s)
			types = append(types, normal)
		}
	}
	add("▁")
	for c := 'a'; c <= 'z'; c++ {
		add(string(c))
	}
	// The tokenizer joins pieces two by two, so every beginning of a word has to be a piece.
	for _, w := range tinyWords {
		for i := range w {
			add("▁" + w[:i+1])
		}
	}
	for i := len(pieces); i < Vocabulary; i++ {
		pieces = append(pieces, fmt.Sprintf("<unused%d>", i))
		types = append(types, unused)
	}
	scores := make([]float32, Vocabulary)
	for i := range scores {
		scores[i] = -float32(i)
	}
	b.set("tokenizer.ggml.model", "llama")
	b.set("tokenizer.ggml.tokens", pieces[:Vocabulary])
	b.set("tokenizer.ggml.scores", scores)
	b.set("tokenizer.ggml.token_type", types[:Vocabulary])
	b.set("tokenizer.ggml.bos_token_id", uint32(1))
	b.set("tokenizer.ggml.eos_token_id", uint32(2))
	b.set("tokenizer.ggml.unknown_token_id", uint32(0))
}

// TinyAdapter makes a LoRA adapter for the tiny llama model.
func TinyAdapter(seed uint64) *File {
	const rank = 4
	b := &builder{File: &File{}, arch: "llama", r: rand.New(rand.NewPCG(seed, 2))}
	b.set("general.type", "adapter")
	b.set("general.architecture", b.arch)
	b.set("adapter.type", "lora")
	b.set("adapter.lora.alpha", float32(2*rank))
	for i := range 4 {
		b.matrix(layer(i)+"attn_q.weight.lora_a", width, rank)
		b.matrix(layer(i)+"attn_q.weight.lora_b", rank, heads*headDim)
	}
	return b.File
}
