//! Downloads from a hub that behaves and one that does not: what comes is whole or not there, what was broken off goes
//! on where it was, and other tools share the cache.
//!
//! The hub is `tests/hub_server`; it counts what it sends, and each of its faults has a test of its own here.

mod faults;
mod listings;
mod place;
mod random;
