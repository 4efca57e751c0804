// Package fuzz looks for the sequence of operations, faults and crashes that breaks the promise of a Holdfast database: listed
// means restorable.
//
// Model is the promise in plain Go: a map of checkpoints. A history is a random sequence of operations on a real database in a
// real directory; after every step the database is held against the model. A crash is an image of the directory taken
// while the database is open, as a killed process leaves it, and the history goes on from the image.
//
// What is here works on process death. Power loss, where the file system may keep any subset of what was not synced, is
// covered for the log in package wal; a simulated disk under the whole database is not here yet.
package fuzz
