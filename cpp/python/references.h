// References to Python objects in the hands of the core, whose threads never wait for the
// interpreter lock: one dropped without it is put aside, and the next call from Python lets go of
// it.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

namespace torchbeast {

// Lets go of something of Python's by calling release(thing), now or, without the interpreter lock,
// in the next call from Python.
void let_go(void* thing, void (*release)(void*));

// A new reference that any thread may drop. The caller holds the interpreter lock.
std::shared_ptr<void> hold(nanobind::handle object);

// Lets go of what was put aside. The caller holds the interpreter lock.
void release_dropped();

}  // namespace torchbeast
