package main

import (
	"container/heap"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"time"
)

// A generated workload is a serving process as coding and research agents load it. A handful of products, each with a
// long system prompt and tool descriptions, work on a few dozen projects, each with its own instructions; so many
// conversations begin alike. A conversation is turns of a model that answers and calls tools, and of a person who
// thinks before writing on. What makes it hard for a prefix cache is what people and agents really do:
//
//	retry      the same prompt again, for another answer: a fork before the original response
//	abort      the answer is stopped part way, and what follows goes on from the cut with other tokens
//	rewind     an earlier message is edited: the conversation goes on from there, the rest is left behind
//	branch     both versions live on
//	side       a short request over the whole context (a title, a summary) of which nothing comes back
//	sub-agent  a task with its own prompt and its own turns, whose result comes back into the conversation
//	compaction a context that grew too long is replaced by a summary after the shared beginning
//
// Everything follows from the seed: the same seed gives the same requests. There is no floating point in it, whose last
// bits differ from one architecture to another.
const (
	generatedRequests = 2000 // of a replay that was given neither a trace nor a limit

	agentProducts     = 4
	agentProjects     = 24
	agentsAtOnce      = 16 // conversations that are alive at the same time, branches apart
	contextTokensMax  = 64 << 10
	rewindTurnsMax    = 12 // how far back an edit goes
	subAgentTurnsMax  = 6
	conversationTurns = 14 // median

	// Out of a thousand turns.
	retryPerMille    = 50
	abortPerMille    = 40
	rewindPerMille   = 25
	branchPerMille   = 20
	sidePerMille     = 60
	subAgentPerMille = 45
)

// product is an agent as it is sold: what all its conversations begin with.
type product struct {
	system, tools            uint64 // texts
	systemTokens, toolTokens int64
}

// project is what a product is used on: instructions that its conversations share.
type project struct {
	instructions uint64 // text
	tokens       int64
}

// thread is one line of conversation.
type thread struct {
	due     time.Duration // when its next request arrives
	order   int           // breaks ties of due
	product product
	project project
	text    transcript   // the next prompt
	past    []transcript // prompts at which the person spoke, latest last, at most rewindTurnsMax
	turns   int          // requests left
	oneShot bool         // a side request: it ends with its answer
	parent  *thread      // the thread that waits for this one's result; nil for a conversation
}

// generator is a simulation of the agents: threads in the order in which their next requests arrive.
type generator struct {
	rng      *rand.Rand
	products []product
	projects []project
	threads  threadQueue
	texts    uint64 // texts named so far
	orders   int    // threads queued so far
	alive    int    // conversations that have not ended
	clock    time.Duration
	events   map[string]int // turns by what happened after them, for tests
}

// generate gives n requests of the workload of a seed.
func generate(seed uint64, n int) source {
	return source{
		name:  fmt.Sprintf("generated (seed %d)", seed),
		total: n,
		requests: func(yield func(request, error) bool) {
			g := newGenerator(seed)
			for i := range n {
				r := g.next()
				r.Index = i
				if !yield(r, nil) {
					return
				}
			}
		},
	}
}

func newGenerator(seed uint64) *generator {
	g := &generator{rng: rand.New(rand.NewPCG(seed, 0x686f6c6466617374)), events: map[string]int{}}
	for range agentProducts {
		g.products = append(g.products, product{
			system: g.newText(), systemTokens: g.between(900, 3500),
			tools: g.newText(), toolTokens: g.between(1200, 6000),
		})
	}
	for range agentProjects {
		g.projects = append(g.projects, project{instructions: g.newText(), tokens: g.between(200, 5000)})
	}
	g.populate()
	return g
}

// next takes the thread that is due, gives its request, and decides how the thread goes on.
func (g *generator) next() request {
	t := heap.Pop(&g.threads).(*thread)
	g.clock = t.due
	answer, answerTokens := g.newText(), g.length(260, wide, 8, 4000)
	r := request{At: t.due, Input: t.text.tokens, Output: answerTokens, Blocks: t.text.blocks[:len(t.text.blocks):len(t.text.blocks)]}
	// About 60 tokens a second come out of the model.
	answered := t.due + time.Duration(answerTokens)*time.Second/60
	g.goOn(t, answer, answerTokens, answered)
	return r
}

// goOn decides what follows an answer.
func (g *generator) goOn(t *thread, answer uint64, answerTokens int64, answered time.Duration) {
	t.turns--
	switch dice := g.rng.IntN(1000); {
	case t.oneShot:
		g.count("side ended")

	case t.turns <= 0 && t.parent != nil:
		// The result of a sub-agent comes back as the answer of a tool.
		g.count("sub-agent ended")
		t.parent.text.add(g.newText(), g.length(400, narrow, 40, 3000))
		g.schedule(t.parent, answered)

	case t.turns <= 0:
		g.count("ended")
		g.alive--
		g.populate()

	case t.text.tokens+answerTokens > contextTokensMax:
		g.count("compacted")
		t.text = g.opening(t.product, t.project)
		t.past = nil
		t.text.add(g.newText(), g.length(1500, narrow, 300, 5000))
		g.speak(t, answered)

	case below(&dice, retryPerMille):
		g.count("retried")
		g.schedule(t, answered+g.wait(1500*time.Millisecond))

	case below(&dice, abortPerMille):
		g.count("aborted")
		t.text.add(answer, 1+g.rng.Int64N(answerTokens))
		g.speak(t, answered)

	case below(&dice, rewindPerMille) && len(t.past) > 1:
		g.count("rewound")
		back := 1 + g.rng.IntN(len(t.past)-1)
		t.past = t.past[:len(t.past)-back]
		t.text = t.past[len(t.past)-1]
		g.speak(t, answered)

	case below(&dice, branchPerMille):
		g.count("branched")
		t.text.add(answer, answerTokens)
		twin := *t
		twin.past = append([]transcript(nil), t.past...)
		twin.parent = nil // one result comes back, not two
		g.alive++
		g.speak(&twin, answered)
		g.speak(t, answered)

	case below(&dice, sidePerMille):
		g.count("side")
		t.text.add(answer, answerTokens)
		side := &thread{text: t.text, oneShot: true}
		side.text.add(g.newText(), g.between(30, 200))
		g.schedule(side, answered+g.wait(100*time.Millisecond))
		g.listen(t, answered)

	case below(&dice, subAgentPerMille) && t.parent == nil:
		g.count("sub-agent")
		t.text.add(answer, answerTokens)
		sub := &thread{product: g.pick(), project: t.project, parent: t, turns: 1 + g.rng.IntN(subAgentTurnsMax)}
		sub.text = g.opening(sub.product, sub.project)
		sub.text.add(g.newText(), g.length(300, narrow, 40, 2000))
		g.schedule(sub, answered+g.wait(100*time.Millisecond))

	default:
		g.count("continued")
		t.text.add(answer, answerTokens)
		g.listen(t, answered)
	}
}

// listen adds what comes after a whole answer: mostly the result of a tool, else the person.
func (g *generator) listen(t *thread, answered time.Duration) {
	if t.parent == nil && g.rng.IntN(100) < 30 {
		g.speak(t, answered)
		return
	}
	t.text.add(g.newText(), g.length(500, wide, 20, 8000))
	g.schedule(t, answered+g.wait(time.Second))
}

// speak adds a message of the person, after a time to think.
func (g *generator) speak(t *thread, answered time.Duration) {
	if len(t.past) == rewindTurnsMax {
		t.past = append(t.past[:0:0], t.past[1:]...)
	}
	t.past = append(t.past[:len(t.past):len(t.past)], t.text)
	t.text.add(g.newText(), g.length(90, wide, 5, 2500))
	g.schedule(t, answered+g.wait(15*time.Second))
}

// populate starts conversations where some have ended.
func (g *generator) populate() {
	for ; g.alive < agentsAtOnce; g.alive++ {
		t := &thread{product: g.pick(), project: g.projects[g.rng.IntN(len(g.projects))]}
		t.turns = int(g.length(conversationTurns, wide, 1, 150))
		t.text = g.opening(t.product, t.project)
		g.speak(t, g.clock+g.wait(6*time.Second))
	}
}

// opening is what a conversation of the product on the project begins with.
func (g *generator) opening(p product, on project) transcript {
	var t transcript
	t.add(p.system, p.systemTokens)
	t.add(p.tools, p.toolTokens)
	t.add(on.instructions, on.tokens)
	return t
}

func (g *generator) schedule(t *thread, due time.Duration) {
	t.due = due
	t.order = g.orders
	g.orders++
	heap.Push(&g.threads, t)
}

// pick chooses a product; the first ones are the popular ones.
func (g *generator) pick() product {
	return g.products[g.rng.IntN(1+g.rng.IntN(len(g.products)))]
}

func (g *generator) newText() uint64 { g.texts++; return g.texts }

func (g *generator) count(event string) { g.events[event]++ }

// between is uniform in [low, high].
func (g *generator) between(low, high int64) int64 { return low + g.rng.Int64N(high-low+1) }

// How far lengths scatter: in coin flips, half of which double a length and half of which halve it.
const (
	narrow = 4
	wide   = 8
)

// length gives a length as texts have them: mostly around the median, now and then far below or above. The number of
// heads in a row of flips is nearly normal, so the result is nearly log-normal.
func (g *generator) length(median int64, flips int, low, high int64) int64 {
	octaves := bits.OnesCount64(g.rng.Uint64()&(1<<flips-1)) - flips/2
	n := median * g.between(724, 1448) >> 10 // 2^-½ to 2^½ of it
	if octaves >= 0 {
		n <<= octaves
	} else {
		n >>= -octaves
	}
	return min(max(n, low), high)
}

// wait scatters a time as widely as texts scatter.
func (g *generator) wait(median time.Duration) time.Duration {
	return time.Duration(g.length(median.Microseconds(), wide, 0, time.Hour.Microseconds())) * time.Microsecond
}

// below reports whether the dice fell below n, and if not takes n off, for the next question.
func below(dice *int, n int) bool {
	if *dice < n {
		return true
	}
	*dice -= n
	return false
}

// threadQueue orders threads by the arrival of their next request.
type threadQueue []*thread

func (q threadQueue) Len() int { return len(q) }
func (q threadQueue) Less(i, j int) bool {
	if q[i].due != q[j].due {
		return q[i].due < q[j].due
	}
	return q[i].order < q[j].order
}
func (q threadQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *threadQueue) Push(x any)   { *q = append(*q, x.(*thread)) }
func (q *threadQueue) Pop() any {
	old := *q
	t := old[len(old)-1]
	*q = old[:len(old)-1]
	return t
}
