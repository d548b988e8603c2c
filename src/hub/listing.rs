//! What a hub says of a repository: its files, their sizes and hashes, and its licence. All of it is anybody's word.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{digest::ContentId, error::HubError, reference::RepoId};

/// More files than any model has.
const MAX_FILES: usize = 100_000;

/// What file systems take as one name, and more than any model has for a path.
const MAX_NAME: usize = 255;
const MAX_PATH: usize = 1024;

/// A repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    pub repo: RepoId,
    /// The commit that the revision stands for.
    pub commit: String,
    /// As the repository states it, or nothing.
    pub license: Option<String>,
    /// By name, relative with `/` between folders.
    pub files: BTreeMap<String, RemoteFile>,
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    pub bytes: u64,
    pub id: ContentId,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(rename = "cardData")]
    card: Option<Box<RawValue>>,
    siblings: Vec<Sibling>,
}

#[derive(Default, Deserialize)]
struct Card {
    license: Option<Box<RawValue>>,
    license_name: Option<Box<RawValue>>,
    license_link: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Listing {
    /// Reads the answer of `GET /api/models/{id}/revision/{revision}?blobs=true`.
    pub(super) fn parse(repo: &RepoId, json: &[u8]) -> Result<Listing, HubError> {
        let bad = |problem: String| HubError::Listing { repo: repo.clone(), problem };
        if json.trim_ascii_start().starts_with(b"<") {
            return Err(bad(
                "the answer is a web page; is there a page to log in to this network?".to_owned()
            ));
        }
        let answer: Answer = serde_json::from_slice(json).map_err(|e| bad(e.to_string()))?;
        if !is_commit(&answer.sha) {
            return Err(bad(format!("{:?} is no commit", answer.sha)));
        }
        if is_commit(&repo.revision) && answer.sha != repo.revision {
            return Err(bad(format!("it is of commit {}", answer.sha)));
        }
        if answer.siblings.len() > MAX_FILES {
            return Err(bad(format!("{} files; at most {MAX_FILES} are read", answer.siblings.len())));
        }
        let mut files = BTreeMap::new();
        for sibling in answer.siblings {
            let (name, file) = remote_file(sibling).map_err(bad)?;
            if files.insert(name.clone(), file).is_some() {
                return Err(bad(format!("{name:?} is listed twice")));
            }
        }
        let inside = |name: &&String| {
            let mut above = name.match_indices('/').map(|(slash, _)| &name[..slash]);
            above.any(|folder| files.contains_key(folder))
        };
        if let Some(name) = files.keys().find(inside) {
            return Err(bad(format!("{name:?} lies in what is a file itself")));
        }
        Ok(Listing {
            repo: repo.clone(),
            commit: answer.sha,
            license: answer.card.and_then(|card| license(&card)),
            files,
        })
    }

    /// A file that something else names.
    pub fn file(&self, name: &str, by: &str) -> Result<&RemoteFile, HubError> {
        self.files.get(name).ok_or_else(|| HubError::NoFile {
            repo: self.repo.clone(),
            file: name.to_owned(),
            by: by.to_owned(),
        })
    }
}

fn remote_file(sibling: Sibling) -> Result<(String, RemoteFile), String> {
    let Sibling { rfilename: name, size, blob, lfs } = sibling;
    if !is_inside(&name) {
        return Err(format!("{name:?} is no name of a file inside a folder"));
    }
    let (bytes, id) = match (lfs, size, blob) {
        (Some(lfs), ..) => (Some(lfs.size), ContentId::sha256(&lfs.sha256)),
        (None, size, blob) => (size, blob.as_deref().and_then(ContentId::git)),
    };
    match (bytes, id) {
        (Some(bytes), Some(id)) if i64::try_from(bytes).is_ok() => Ok((name, RemoteFile { bytes, id })),
        _ => Err(format!("{name:?} has no size or no hash")),
    }
}

/// Whether a name is that of one file below a folder, in the one way to write it.
fn is_inside(name: &str) -> bool {
    let plain = |part: &str| !part.is_empty() && part != "." && part != ".." && part.len() <= MAX_NAME;
    name.len() <= MAX_PATH && name.split('/').all(plain) && !name.contains(['\\', '\0'])
}

/// What a card holds is its author's business: one of another form names no licence.
fn license(card: &RawValue) -> Option<String> {
    let card: Card = serde_json::from_str(card.get()).ok()?;
    let text = |value: Option<Box<RawValue>>| serde_json::from_str::<String>(value?.get()).ok();
    // `other` with the name of a licence of its own.
    let name = text(card.license_name).or_else(|| text(card.license))?;
    Some(text(card.license_link).map_or(name.clone(), |link| format!("{name} ({link})")))
}

/// Whether a text is a commit's hash, as git writes it.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}
