//! From a prompt to a picture: what happens around the graphs. Sees no graph and no session.

pub mod dump;
pub mod embedding;
pub mod event;
pub mod flux2;
pub mod image;
pub mod noise;
pub mod position;
pub mod probe;
pub mod prompt;
pub mod qwen_image;
pub mod run;
pub mod run_folder;
pub mod runs;
pub mod schedule;
pub mod size;
pub mod text_to_image;
