package db

// longLock is a mutex that is held over I/O. It is a channel, so that who waits for it is seen to wait by what looks at
// goroutines from outside: a bubble of testing/synctest lets time pass, and a simulated disk go on, only then.
type longLock chan struct{}

func newLongLock() longLock { return make(longLock, 1) }

// Lock takes the lock.
func (l longLock) Lock() { l <- struct{}{} }

// Unlock gives it back.
func (l longLock) Unlock() { <-l }
