package main

import "errors"

// Driver and child talk in JSON lines over the child's standard input and output, one question and then its answer.
//
//	driver → child   {"do":"open","setup":{…}}      child → driver   {"is":"opened"}
//	                 {"do":"find","request":{…}}                     {"is":"found","found":{…}}
//	                 {"do":"publish","request":{…},"from":{…}}       {"is":"published","published":{…}}
//	                 {"do":"reopen"}                                 {"is":"reopened"}
//	                 {"do":"census"}                                 {"is":"counted","census":{…}}
//	                 {"do":"close"}                                  {"is":"closed"}
//
// Any question may be answered by {"is":"failed","error":"…","status":3}; the child ends after that. An answer is
// written whole before the next step begins: found before anything is published, published after the database
// acknowledged it. So whatever the driver reads from a dead child's pipe is true of the directory the child left.
//
// The end of the driver's side means that the driver is gone; the child ends at once, in the middle of what it does.
type question struct {
	Do      verb     `json:"do"`
	Setup   *setup   `json:"setup,omitempty"`
	Request *request `json:"request,omitempty"`
	From    *found   `json:"from,omitempty"`
}

type answer struct {
	Is        verb       `json:"is"`
	Found     *found     `json:"found,omitempty"`
	Published *published `json:"published,omitempty"`
	Census    *census    `json:"census,omitempty"`
	Error     string     `json:"error,omitempty"`
	Status    int        `json:"status,omitempty"` // exit status the error stands for
}

type verb string

const (
	doOpen, isOpened       verb = "open", "opened"
	doFind, isFound        verb = "find", "found"
	doPublish, isPublished verb = "publish", "published"
	doReopen, isReopened   verb = "reopen", "reopened"
	doCensus, isCounted    verb = "census", "counted"
	doClose, isClosed      verb = "close", "closed"
	isFailed               verb = "failed"
)

// err gives the error that the answer reports, or nil.
func (a answer) err() error {
	if a.Is != isFailed {
		return nil
	}
	return failure{a.Status, errors.New(a.Error)}
}
