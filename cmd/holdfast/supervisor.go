package main

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os/exec"
	"time"
)

// supervisor is a holder whose database lives in a child process, which it kills now and then.
//
// A kill goes through stages. After killEvery acknowledged publications it is planned. It is carried out at its point
// inside the next requests. What the dead child had still written into its pipe is read. A new child opens the
// directory. The question that was not answered is asked again. So each question of the driver gets exactly one answer
// and the driver knows nothing of all this. A publication may be carried out twice in this way, which changes nothing;
// a lookup that was answered is never repeated, for after the publication that follows it would find itself. That is
// why a replay with kills finds exactly what one without them finds.
//
// Rejected: asking for the whole request again after a kill, which makes the totals depend on where kills fall; and
// killing only between the messages of the protocol, which leaves out the middle of a write.
type supervisor struct {
	setup        setup
	command      func() *exec.Cmd // the child, not yet started
	log          io.Writer        // receives the children's standard error; nil drops it
	killEvery    int              // 0 = no kills
	points       []killPoint      // to choose from
	rng          *rand.Rand
	acknowledged int // publications since the last kill
	plan         killPlan
	child        *childProcess
	buried       written // by children that are dead
	last         written // by the child that lives, as of its last answer
	usual        map[verb]time.Duration
	kills        map[killPoint]int // so far, by where they hit
}

// killPoint is where in the life of a request a child is killed.
type killPoint string

const (
	noKill        killPoint = ""
	whenAsked     killPoint = "asked"          // as soon as a request was sent
	inLookup      killPoint = "in lookup"      // at a random time of lookup, restore and check
	whenFound     killPoint = "found"          // after the answer, before publishing
	inPublish     killPoint = "in publication" // at a random time of publishing
	whenPublished killPoint = "published"      // after the acknowledgement
	inOpen        killPoint = "in open"        // after the acknowledgement, and the next child at a random time of its opening
)

// allKillPoints lists inPublish more than once: most kills go where there is something to tear.
var allKillPoints = []killPoint{whenAsked, inLookup, whenFound, inPublish, inPublish, inPublish, whenPublished, inOpen}

// killPlan is a kill that is due.
type killPlan struct {
	at     killPoint
	wait   time.Duration // how far into the question, for the points at a random time
	reopen bool          // the child after this one is to be killed while it opens
}

// during gives the point at a random time of a question.
func during(do verb) killPoint {
	switch do {
	case doOpen:
		return inOpen
	case doFind:
		return inLookup
	case doPublish:
		return inPublish
	}
	return noKill
}

// after gives the point right after the answer to a question.
func after(do verb) killPoint {
	switch do {
	case doFind:
		return whenFound
	case doPublish:
		return whenPublished
	}
	return noKill
}

// newSupervisor starts the first child. seed decides where kills fall, as far as that is not the clock's doing.
func newSupervisor(s setup, killEvery int, seed uint64, command func() *exec.Cmd, log io.Writer) (*supervisor, error) {
	s.CountEach = true
	v := &supervisor{
		setup: s, command: command, log: log, killEvery: killEvery, points: allKillPoints,
		rng:   rand.New(rand.NewPCG(seed, 0x6b696c6c)),
		usual: map[verb]time.Duration{},
		kills: map[killPoint]int{},
	}
	return v, v.start()
}

func (v *supervisor) find(_ context.Context, r request) (found, error) {
	a, err := v.ask(question{Do: doFind, Request: &r}, isFound)
	if err != nil {
		return found{}, err
	}
	return *a.Found, nil
}

func (v *supervisor) publish(_ context.Context, r request, from found) (published, error) {
	from.Faults = nil // said already
	a, err := v.ask(question{Do: doPublish, Request: &r, From: &from}, isPublished)
	if err != nil {
		return published{}, err
	}
	// Publications count from one kill to the plan of the next, so that however often kills are asked for, there is
	// progress in between.
	if v.plan.at == noKill && a.Published.Refused == "" {
		v.acknowledged++
	}
	if v.killEvery > 0 && v.acknowledged >= v.killEvery {
		v.acknowledged = 0
		v.planKill()
	}
	return *a.Published, nil
}

func (v *supervisor) reopen(context.Context) error {
	_, err := v.ask(question{Do: doReopen}, isReopened)
	return err
}

func (v *supervisor) census(context.Context) (census, error) {
	a, err := v.ask(question{Do: doCensus}, isCounted)
	if err != nil {
		return census{}, err
	}
	c := *a.Census
	c.Written = v.buried.add(v.last)
	return c, nil
}

func (v *supervisor) close(context.Context) error {
	if v.child.ended {
		return nil // it failed, and said so then
	}
	if _, err := v.ask(question{Do: doClose}, isClosed); err != nil {
		return err
	}
	return v.child.wait()
}

// planKill chooses where the next kill falls.
func (v *supervisor) planKill() {
	switch at := v.points[v.rng.IntN(len(v.points))]; at {
	case inLookup:
		v.plan = killPlan{at: at, wait: v.within(doFind)}
	case inPublish:
		v.plan = killPlan{at: at, wait: v.within(doPublish)}
	case inOpen:
		v.plan = killPlan{at: whenPublished, reopen: true}
	default:
		v.plan = killPlan{at: at}
	}
}

// within gives a random time at which a question is likely still being worked on.
func (v *supervisor) within(do verb) time.Duration {
	return time.Duration(v.rng.Int64N(int64(v.usual[do]) + 1))
}

// ask gets the answer to q, from as many children as it takes.
func (v *supervisor) ask(q question, want verb) (answer, error) {
	for {
		a, err := v.try(q, want)
		if v.child.killed {
			if restartErr := v.restart(); restartErr != nil {
				return answer{}, restartErr
			}
		}
		if !errors.Is(err, errKilled) {
			return a, err
		}
	}
}

// try asks the living child once and carries the plan out where it applies. With errKilled the child left no answer;
// a child that was killed may have left one all the same.
func (v *supervisor) try(q question, want verb) (answer, error) {
	start := time.Now()
	if err := v.child.send(q); err != nil {
		return answer{}, err
	}
	var killer <-chan time.Time
	switch {
	case v.plan.at == noKill:
	case v.plan.at == whenAsked && q.Do == doFind:
		v.kill()
	case v.plan.at == during(q.Do):
		t := time.NewTimer(v.plan.wait)
		defer t.Stop()
		killer = t.C
	}
	a, err := v.child.receive(want, killer, v.kill)
	if err != nil {
		return answer{}, err
	}
	v.usual[q.Do] += (time.Since(start) - v.usual[q.Do]) / 8
	switch {
	case a.Published != nil:
		v.last = a.Published.Written // of this child alone; what it wrote after its last answer is not counted
	case a.Census != nil:
		v.last = a.Census.Written
	}
	switch {
	case v.child.killed, v.plan.at == noKill:
	case v.plan.at == after(q.Do):
		v.kill()
	case v.plan.at == during(q.Do):
		v.plan.wait /= 2 // the answer came first; before long one will not
	}
	return a, nil
}

// kill ends the child as a crash would.
func (v *supervisor) kill() {
	v.child.kill()
	v.kills[v.plan.at]++
}

// restart puts a new child in the place of a killed one.
func (v *supervisor) restart() error {
	again := v.plan.reopen
	v.plan = killPlan{}
	if err := v.bury(); err != nil {
		return err
	}
	if again {
		v.plan = killPlan{at: inOpen, wait: v.within(doOpen)}
	}
	return v.start()
}

// start opens the directory in a new child, and in another one if a kill hit the opening.
func (v *supervisor) start() error {
	for {
		child, err := startChild(v.command(), v.log)
		if err != nil {
			return err
		}
		v.child = child
		_, err = v.try(question{Do: doOpen, Setup: &v.setup}, isOpened)
		v.plan = killPlan{}
		if !child.killed {
			return err
		}
		if err := v.bury(); err != nil {
			return err
		}
	}
}

// bury waits for the end of a killed child and keeps its counts.
func (v *supervisor) bury() error {
	v.buried, v.last = v.buried.add(v.last), written{}
	return v.child.wait()
}
