//! What the hub and the blob host answer when nothing is broken.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::{Value, json};

use crate::{
    Endpoint, Listed, Repository, Request,
    answer::Answer,
    repository::{Access, Stored},
    request::encoded,
};

/// What there is, and where.
pub(crate) struct Routes {
    pub repositories: BTreeMap<String, Arc<Repository>>,
    pub hub: String,
    pub blobs: String,
}

impl Routes {
    /// The answer when nothing is broken, the range that was asked for aside.
    pub fn answer(&self, request: &Request) -> Answer {
        if !matches!(request.method.as_str(), "GET" | "HEAD") {
            return error(405, None, "Method not allowed");
        }
        let names: Vec<&str> = request.segments.iter().map(String::as_str).collect();
        match (request.endpoint, &names[..]) {
            (Endpoint::Blob, [owner, name, sha256]) => self.blob(&format!("{owner}/{name}"), sha256),
            (Endpoint::Info | Endpoint::Tree, [_, _, owner, name, rest @ ..])
            | (Endpoint::Resolve, ["api", _, _, owner, name, rest @ ..])
            | (Endpoint::Resolve, [owner, name, _, rest @ ..]) => {
                match self.admitted(&format!("{owner}/{name}"), request) {
                    Ok(repository) => self.within(repository, request, rest),
                    Err(refusal) => *refusal,
                }
            }
            _ => error(404, None, "Not found"),
        }
    }

    /// The repository, when whoever asks may see it.
    fn admitted(&self, id: &str, request: &Request) -> Result<&Repository, Box<Answer>> {
        let (token, wants_file) = (request.token(), request.endpoint == Endpoint::Resolve);
        let not_found = || {
            // Who is nobody does not learn whether it exists.
            let status = if token.is_some() { 404 } else { 401 };
            Box::new(error(status, Some("RepoNotFound"), "Repository not found"))
        };
        let repository = self.repositories.get(id).ok_or_else(not_found)?;
        let admitted = repository.token.is_none() || repository.token.as_deref() == token;
        match repository.access {
            Access::Private if !admitted => Err(not_found()),
            Access::Gated if !admitted && wants_file => {
                let status = if token.is_some() { 403 } else { 401 };
                let message = format!("Access to model {id} is restricted.");
                Err(Box::new(error(status, Some("GatedRepo"), &message)))
            }
            _ => Ok(repository),
        }
    }

    fn within(&self, repository: &Repository, request: &Request, rest: &[&str]) -> Answer {
        let (revision, path) = match (request.endpoint, rest) {
            (Endpoint::Info, []) => ("main", &[][..]),
            (Endpoint::Info, [_, revision]) => (*revision, &[][..]),
            (Endpoint::Tree, [_, revision, folder @ ..]) => (*revision, folder),
            (Endpoint::Resolve, [revision, file @ ..]) => (*revision, file),
            _ => return error(404, None, "Not found"),
        };
        let Some((tree, commit)) = repository.at(revision) else {
            return error(404, Some("RevisionNotFound"), &format!("Invalid rev id: {revision}"));
        };
        let path = path.join("/");
        let missing = || {
            let mut answer = error(404, Some("EntryNotFound"), "Entry not found");
            answer.headers.push(("X-Repo-Commit", commit.clone()));
            answer
        };
        match request.endpoint {
            Endpoint::Info => info(repository, &commit, &repository.listing(tree), request),
            Endpoint::Tree => {
                self.tree(repository, &path, &repository.listing(tree), request).unwrap_or_else(missing)
            }
            _ => tree.get(&path).map_or_else(missing, |stored| {
                let direct =
                    stored.lfs.is_none() && !repository.cached_redirects || is_cached_redirect(request);
                if direct {
                    whole(stored, &commit)
                } else {
                    self.redirect(repository, &path, stored, &commit)
                }
            }),
        }
    }

    fn redirect(&self, repository: &Repository, path: &str, stored: &Stored, commit: &str) -> Answer {
        let id = &repository.id;
        let (status, location) = match &stored.lfs {
            Some(lfs) => (302, format!("{}/{id}/{}?filename={}", self.blobs, lfs.sha256, encoded(path))),
            None => {
                let path: Vec<String> = path.split('/').map(encoded).collect();
                (307, format!("/api/resolve-cache/models/{id}/{commit}/{}", path.join("/")))
            }
        };
        let text = format!("Found. Redirecting to {location}");
        let headers = vec![
            ("Location", location),
            ("X-Repo-Commit", commit.to_owned()),
            ("X-Linked-Etag", format!("\"{}\"", stored.etag())),
            ("X-Linked-Size", stored.content.size().to_string()),
            ("Content-Type", "text/plain; charset=utf-8".to_owned()),
        ];
        Answer::new(status, headers, text.as_str().into())
    }

    fn blob(&self, id: &str, sha256: &str) -> Answer {
        match self.repositories.get(id).and_then(|repository| repository.blob(sha256)) {
            Some(stored) => file(stored, Vec::new()),
            None => error(403, None, "Access denied"),
        }
    }

    /// A page of the entries in a folder, or `None` when there is no such folder.
    fn tree(
        &self,
        repository: &Repository,
        folder: &str,
        listing: &[Listed],
        request: &Request,
    ) -> Option<Answer> {
        let entries =
            entries(folder, listing, request.query("recursive").is_some_and(|value| value != "false"));
        if entries.is_empty() && !folder.is_empty() {
            return None;
        }
        let number = |name: &str| request.query(name).and_then(|value| value.parse::<usize>().ok());
        let first = number("cursor").unwrap_or(0).min(entries.len());
        let next = first.saturating_add(number("limit").unwrap_or(repository.page).max(1)).min(entries.len());
        let mut headers = json_headers();
        if next < entries.len() {
            let recursive = request.query("recursive").unwrap_or("false");
            let limit = number("limit").map(|limit| format!("&limit={limit}")).unwrap_or_default();
            let url = format!("{}{}?recursive={recursive}{limit}&cursor={next}", self.hub, request.path);
            headers.push(("Link", format!("<{url}>; rel=\"next\"")));
        }
        let page = entries[first..next].iter().map(Entry::json);
        Some(Answer::new(200, headers, array(page).as_str().into()))
    }
}

fn is_cached_redirect(request: &Request) -> bool {
    request.path.starts_with("/api/resolve-cache/")
}

fn info(repository: &Repository, commit: &str, listing: &[Listed], request: &Request) -> Answer {
    let blobs = request.query("blobs").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let gated = if repository.access == Access::Gated { json!("auto") } else { json!(false) };
    let mut info = json!({
        "id": repository.id,
        "modelId": repository.id,
        "author": repository.id.split('/').next(),
        "sha": commit,
        "private": repository.access == Access::Private,
        "gated": gated,
        "disabled": false,
        "tags": [],
    });
    if let Some(license) = &repository.license {
        info["cardData"] = json!({ "license": license });
        info["tags"] = json!([format!("license:{license}")]);
    }
    let mut text = info.to_string();
    text.pop();
    text.push_str(",\"siblings\":");
    text.push_str(&array(listing.iter().map(|listed| listed.sibling(blobs))));
    text.push('}');
    Answer::new(200, json_headers(), text.as_str().into())
}

/// A JSON array, without all its values in memory at once: a listing may have a million.
fn array(values: impl Iterator<Item = Value>) -> String {
    let mut text = String::from("[");
    for (i, value) in values.enumerate() {
        if i > 0 {
            text.push(',');
        }
        text.push_str(&value.to_string());
    }
    text + "]"
}

enum Entry<'a> {
    Folder(String),
    File(&'a Listed),
}

impl Entry<'_> {
    fn json(&self) -> Value {
        match self {
            Self::Folder(path) => {
                json!({ "type": "directory", "oid": "0".repeat(40), "size": 0, "path": path })
            }
            Self::File(listed) => listed.entry(),
        }
    }
}

/// The entries of a folder in a file tree: its own files and folders, or those of all folders in it too.
fn entries<'a>(folder: &str, listing: &'a [Listed], recursive: bool) -> Vec<Entry<'a>> {
    let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let mut folders = BTreeSet::new();
    let mut entries = Vec::new();
    for listed in listing {
        let Some(inner) = listed.path.strip_prefix(&prefix) else { continue };
        let inner_folders = inner.match_indices('/').map(|(end, _)| &inner[..end]);
        for name in inner_folders.take(if recursive { usize::MAX } else { 1 }) {
            if folders.insert(name) {
                entries.push(Entry::Folder(format!("{prefix}{name}")));
            }
        }
        if recursive || !inner.contains('/') {
            entries.push(Entry::File(listed));
        }
    }
    entries
}

fn whole(stored: &Stored, commit: &str) -> Answer {
    file(stored, vec![("X-Repo-Commit", commit.to_owned())])
}

fn file(stored: &Stored, mut headers: Vec<(&'static str, String)>) -> Answer {
    headers.push(("ETag", format!("\"{}\"", stored.etag())));
    headers.push(("Accept-Ranges", "bytes".to_owned()));
    headers.push(("Content-Type", "application/octet-stream".to_owned()));
    Answer::new(200, headers, stored.content.clone())
}

fn error(status: u16, code: Option<&str>, message: &str) -> Answer {
    let mut headers = json_headers();
    headers.extend(code.map(|code| ("X-Error-Code", code.to_owned())));
    headers.push(("X-Error-Message", message.to_owned()));
    Answer::new(status, headers, json!({ "error": message }).to_string().as_str().into())
}

fn json_headers() -> Vec<(&'static str, String)> {
    vec![("Content-Type", "application/json; charset=utf-8".to_owned())]
}
