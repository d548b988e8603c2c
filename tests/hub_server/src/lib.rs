//! A local server of model repositories as the Hugging Face hub serves them, which misbehaves on demand.
//!
//! [`HubServer`] listens on two ports of 127.0.0.1: the hub (model information, file trees, small files) and the blob
//! host, to which the hub redirects for files that Git LFS stores. Each request can be hit by a [`Fault`]; what was
//! asked and how many bytes went out is in [`HubServer::served`].
//!
//! | request | answer |
//! |---|---|
//! | `GET /api/models/{id}[/revision/{revision}][?blobs=true]` | information: commit, files, licence, gate |
//! | `GET /api/models/{id}/tree/{revision}[/{folder}][?recursive=true]` | files, in pages (`Link: <…>; rel="next"`) |
//! | `HEAD`, `GET /{id}/resolve/{revision}/{file}` | a small file, or a redirect to the blob host |
//! | `HEAD`, `GET /api/resolve-cache/models/{id}/{commit}/{file}` | the target of redirects within the hub |
//! | `HEAD`, `GET /{id}/{sha256}?filename={file}` on the blob host | a file that Git LFS stores |
//!
//! What the answers hold is what the Python package `huggingface_hub` 2.4.0 reads from the real hub.
//! This package must not know what the tests do with a repository.

mod answer;
mod connection;
mod content;
mod fault;
mod repository;
mod request;
mod routes;
mod server;

pub use content::{Content, noise};
pub use fault::Fault;
pub use repository::{Listed, Repository};
pub use request::{Endpoint, Request};
pub use server::{HubServer, Served};
