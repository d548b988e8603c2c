//! From a prompt to a picture: what happens around the graphs. Sees no graph and no session.

pub mod event;
pub mod image;
pub mod noise;
pub mod position;
pub mod prompt;
pub mod schedule;
