// References to Python objects that the core holds. Threads of the core never wait for the
// interpreter lock: a reference that is dropped without it is put into a list, which the next call
// from Python releases.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

namespace torchbeast {

// Calls release(thing): now, or if this thread does not hold the interpreter lock, in the next call
// from Python.
void let_go(void* thing, void (*release)(void*));

// A new reference that any thread may drop. The caller holds the interpreter lock.
std::shared_ptr<void> hold(nanobind::handle object);

// Releases what is in the list. The caller holds the interpreter lock.
void release_dropped();

}  // namespace torchbeast
