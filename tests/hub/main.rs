//! Downloads from a hub that behaves and one that does not: what comes is whole or not there, what was broken off goes
//! on where it was, and other tools share the cache.
//!
//! The hub is `tests/hub_server`; it counts what it sends, and each of its faults has a test of its own here.

#[path = "../support/bad.rs"]
mod bad;
mod faults;
mod listings;
mod place;
mod processes;
#[path = "../support/python.rs"]
mod python;
mod python_cache;
mod random;

use bad::root;
