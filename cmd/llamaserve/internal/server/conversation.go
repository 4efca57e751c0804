package server

import (
	"container/list"
	"fmt"
	"sync"

	"github.com/holdfast-db/holdfast/db"
	"github.com/holdfast-db/holdfast/txn"
)

// conversation is what a request ended with: the prompt and the response, hashed, for whoever goes on from there. It is immutable.
type conversation struct {
	id     string
	tenant string
	tokens []int32
	seq    *db.Sequence // nil without a database
}

// conversations are the last ones, bounded by number and by tokens. Going on from one spares hashing it again, nothing else: a client that
// sends all tokens gets the same from the cache, after a restart too, which these do not survive.
type conversations struct {
	mu     sync.Mutex // guards what follows
	byID   map[string]*list.Element
	recent *list.List // of *conversation, latest first
	bytes  int64
}

func newConversations() *conversations {
	return &conversations{byID: map[string]*list.Element{}, recent: list.New()}
}

func (c *conversation) bytes() int64 { return 4 * int64(len(c.tokens)) }

func (cs *conversations) add(c *conversation) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.byID[c.id] = cs.recent.PushFront(c)
	cs.bytes += c.bytes()
	for cs.recent.Len() > MaxConversations || cs.bytes > MaxConversationBytes && cs.recent.Len() > 1 {
		old := cs.recent.Remove(cs.recent.Back()).(*conversation)
		delete(cs.byID, old.id)
		cs.bytes -= old.bytes()
	}
}

// find gives a conversation of the tenant. ErrNotFound otherwise: also after a restart.
func (cs *conversations) find(id, tenant string) (*conversation, error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	e := cs.byID[id]
	if e == nil || e.Value.(*conversation).tenant != tenant {
		return nil, fmt.Errorf("server: parent %.80q is not among the last %d answers of this process: send the whole prompt: %w", id, MaxConversations, txn.ErrNotFound)
	}
	cs.recent.MoveToFront(e)
	return e.Value.(*conversation), nil
}
