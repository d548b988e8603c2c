//! How users name models: a path, or a repository of a hub.

use std::{
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
};

/// The revision that a repository has where none is named.
pub const MAIN: &str = "main";
/// What begins an address of a repository.
const SCHEME: &str = "hf://";
/// The hub's limit for a whole id.
const MAX_ID: usize = 96;
const MAX_REVISION: usize = 250;
/// Endings of files that are models or pictures by themselves.
const FILES: &[&str] = &["onnx", "safetensors", "gguf", "json", "data", "png", "jpg", "jpeg", "webp"];

/// `owner/name`, `owner/name@revision`, or either behind `hf://`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RepoId {
    /// `owner/name`.
    pub id: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

/// A text that names no repository.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no repository; write owner/name, owner/name@revision or hf://owner/name")]
pub struct RepoIdError(pub String);

impl FromStr for RepoId {
    type Err = RepoIdError;

    fn from_str(text: &str) -> Result<RepoId, RepoIdError> {
        let wrong = || RepoIdError(text.to_owned());
        let named = text.strip_prefix(SCHEME).unwrap_or(text);
        let (id, revision) = named.split_once('@').unwrap_or((named, MAIN));
        let (owner, name) = id.split_once('/').ok_or_else(wrong)?;
        let is_id = id.len() <= MAX_ID && is_part(owner) && is_part(name);
        if !is_id || !is_revision(revision) {
            return Err(wrong());
        }
        Ok(RepoId { id: id.to_owned(), revision: revision.to_owned() })
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.revision[..] {
            MAIN => f.write_str(&self.id),
            revision => write!(f, "{}@{revision}", self.id),
        }
    }
}

/// The hub's rules for an owner and for a name. `--` would be taken for the slash in the cache's folder names.
fn is_part(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !part.is_empty()
        && part.chars().all(allowed)
        && !part.contains("--")
        && !part.contains("..")
        && !part.starts_with(['.', '-'])
        && !part.ends_with(['.', '-'])
}

/// Git's rules, as far as they matter for a path and an address.
fn is_revision(revision: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-/+".contains(c);
    revision.len() <= MAX_REVISION
        && revision.chars().all(allowed)
        && revision.split('/').all(|part| !part.is_empty() && !part.starts_with('.') && !part.ends_with('.'))
        && !revision.contains("..")
}

/// What a user names where a model is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelName {
    Path(PathBuf),
    Repository(RepoId),
}

/// What exists is a path, whatever it looks like, and so is what is named like a file of a model. Paths need not be text.
impl From<OsString> for ModelName {
    fn from(name: OsString) -> ModelName {
        let path = Path::new(&name);
        let is_file = path.extension().is_some_and(|ending| FILES.iter().any(|file| ending == *file));
        let text = name.to_str().unwrap_or_default();
        match text.parse() {
            Ok(repo) if text.starts_with(SCHEME) || !(is_file || path.exists()) => {
                ModelName::Repository(repo)
            }
            _ => ModelName::Path(name.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_are_named() {
        for (text, id, revision) in [
            ("a/b", "a/b", "main"),
            ("hf://a/b", "a/b", "main"),
            ("Qwen/Qwen-Image-2.1@v1", "Qwen/Qwen-Image-2.1", "v1"),
            ("hf://a_1/b.c-d@refs/pr/3", "a_1/b.c-d", "refs/pr/3"),
        ] {
            let expected = RepoId { id: id.to_owned(), revision: revision.to_owned() };
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn anything_else_is_none() {
        for text in [
            "",
            "a",
            "/a",
            "a/",
            "a/b/c",
            "./a",
            "../a",
            "a/..",
            "a/.b",
            "~/a",
            "a/b@",
            "a/b@../x",
            "a/b@x//y",
            "a/b@/x",
            "a--b/c",
            "a/b c",
            "hf://",
            "hf:/a/b",
            "a/b\0",
            "a\\b/c",
            "https://x/y",
            "a/b@x@y",
            "ä/b",
        ] {
            assert_eq!(text.parse::<RepoId>(), Err(RepoIdError(text.to_owned())), "{text}");
        }
        assert!(format!("a/{}", "b".repeat(95)).parse::<RepoId>().is_err());
    }

    #[test]
    fn what_exists_is_a_path() {
        assert_eq!(ModelName::from(OsString::from("src/hub")), ModelName::Path("src/hub".into()));
        assert!(matches!(ModelName::from(OsString::from("hf://src/hub")), ModelName::Repository(_)));
        assert!(matches!(ModelName::from(OsString::from("src/no-such")), ModelName::Repository(_)));
        assert_eq!(
            ModelName::from(OsString::from("pictures/fox.png")),
            ModelName::Path("pictures/fox.png".into())
        );
        assert_eq!(ModelName::from(OsString::from("./no-such")), ModelName::Path("./no-such".into()));
    }
}
