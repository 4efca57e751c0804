package txn

import (
	"cmp"
	"fmt"
)

// enterSpine makes the way to the block in which the checkpoint ends.
func (a *applier) enterSpine(r *Publish) error {
	m := &r.Manifest
	var node spineEntry
	if len(r.Spine) == 0 {
		if err := mustLoad(a.v, key1(tagSpine, m.Spine), &node); err != nil {
			return err
		}
		node.add(m.Tail(), 1)
		return a.v.Set(key1(tagSpine, m.Spine), node.marshal())
	}
	index := m.SpineIndex() - int64(len(r.Spine)) // of the parent, −1 if there is none
	parent := r.SpineRoot
	if !parent.IsZero() {
		if err := mustLoad(a.v, key1(tagSpine, parent), &node); err != nil {
			return err
		}
		node.children++
		if err := a.v.Set(key1(tagSpine, parent), node.marshal()); err != nil {
			return err
		}
	} else {
		node.index = -1
	}
	if node.index != index || r.Spine[len(r.Spine)-1] != m.Spine {
		return fmt.Errorf("spine of %d blocks after block %d does not end in block %d: %w", len(r.Spine), node.index, m.SpineIndex(), ErrCorrupt)
	}
	for i, key := range r.Spine {
		index++
		if i == 0 { // a block is there only if the one before it is
			if known, err := a.v.Get(key1(tagSpine, key)); err != nil || known != nil {
				return cmp.Or(err, fmt.Errorf("block %s is there already: %w", key.Short(), ErrCorrupt))
			}
		}
		node = spineEntry{parent: parent, index: index, children: 1}
		if i == len(r.Spine)-1 {
			node.children = 0
			node.add(m.Tail(), 1)
		}
		if err := a.v.Set(key1(tagSpine, key), node.marshal()); err != nil {
			return err
		}
		parent = key
	}
	return nil
}

// leaveSpine takes the checkpoint's end away, and with it the blocks that lead nowhere any more.
func (a *applier) leaveSpine(m *Manifest) error {
	var node spineEntry
	key := m.Spine
	if err := mustLoad(a.v, key1(tagSpine, key), &node); err != nil {
		return err
	}
	if node.add(m.Tail(), -1) < 0 {
		return refuse(ExactAccounting, ErrCorrupt, "no checkpoint is counted as ending %d tokens into block %s", m.Tail(), key.Short())
	}
	for node.empty() {
		if err := a.v.Delete(key1(tagSpine, key)); err != nil {
			return err
		}
		if key = node.parent; key.IsZero() {
			return nil
		}
		if err := mustLoad(a.v, key1(tagSpine, key), &node); err != nil {
			return err
		}
		if node.children--; node.children < 0 {
			return refuse(ExactAccounting, ErrCorrupt, "block %s is counted as followed by none and one follows it", key.Short())
		}
	}
	return a.v.Set(key1(tagSpine, key), node.marshal())
}
