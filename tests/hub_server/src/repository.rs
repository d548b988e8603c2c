//! A model repository: its files at each revision, and who may have them.

use std::{borrow::Cow, collections::BTreeMap, fs, io, path::Path};

use serde_json::{Value, json};

use crate::Content;

/// Files of at least this size, and those with these endings, are stored with Git LFS when a folder is served.
const LFS_FROM: u64 = 1 << 20;
const LFS_ENDINGS: [&str; 4] = ["safetensors", "onnx", "data", "bin"];

/// A model repository. The files of `main` are added one by one; [`tag`](Self::tag) gives what is there another name.
#[derive(Clone)]
pub struct Repository {
    pub(crate) id: String,
    pub(crate) revisions: BTreeMap<String, Tree>,
    pub(crate) license: Option<String>,
    pub(crate) access: Access,
    pub(crate) token: Option<String>,
    pub(crate) page: usize,
    pub(crate) cached_redirects: bool,
    listing: Option<Vec<Listed>>,
}

pub(crate) type Tree = BTreeMap<String, Stored>;

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Access {
    Open,
    Gated,
    Private,
}

/// A file as the hub stores it.
#[derive(Clone)]
pub(crate) struct Stored {
    pub content: Content,
    /// What Git stores: of a file in LFS, the pointer.
    pub blob: String,
    pub lfs: Option<Lfs>,
}

#[derive(Clone)]
pub(crate) struct Lfs {
    pub sha256: String,
    pub pointer_size: usize,
}

/// A file as a listing states it, true or not.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Path in the repository.
    pub path: String,
    /// Size in bytes; any JSON value.
    pub size: Value,
    /// The Git SHA-1 in hexadecimal.
    pub blob: String,
    /// The SHA-256 in hexadecimal, for files in Git LFS.
    pub sha256: Option<String>,
    /// Size in bytes of the pointer that stands for a file in Git LFS.
    pub pointer_size: usize,
}

impl Repository {
    /// A public repository without files; `id` is `owner/name`.
    pub fn new(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            revisions: BTreeMap::from([("main".to_owned(), Tree::new())]),
            license: None,
            access: Access::Open,
            token: None,
            page: 1000,
            cached_redirects: false,
            listing: None,
        }
    }

    /// The files of a folder and its subfolders, which stay on disk; weights and large ones as files in Git LFS.
    pub fn from_folder(id: &str, folder: &Path) -> io::Result<Self> {
        let mut repository = Self::new(id);
        let mut folders = vec![folder.to_owned()];
        while let Some(inner) = folders.pop() {
            for entry in fs::read_dir(inner)? {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let name =
                    path.strip_prefix(folder).map_err(io::Error::other)?.to_string_lossy().into_owned();
                let content = Content::open(&path)?;
                let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
                let lfs = content.size() >= LFS_FROM || LFS_ENDINGS.contains(&ending);
                repository.main().insert(name, Stored::new(content, lfs)?);
            }
        }
        Ok(repository)
    }

    /// Adds a file that the hub itself serves.
    #[must_use]
    pub fn file(mut self, path: &str, content: impl Into<Content>) -> Self {
        let stored = Stored::new(content.into(), false).expect("the content can be read");
        self.main().insert(path.to_owned(), stored);
        self
    }

    /// Adds a file in Git LFS, which the blob host serves.
    #[must_use]
    pub fn lfs(mut self, path: &str, content: impl Into<Content>) -> Self {
        let stored = Stored::new(content.into(), true).expect("the content can be read");
        self.main().insert(path.to_owned(), stored);
        self
    }

    /// Keeps the files of `main` as they are now under another name, for a branch or a tag.
    #[must_use]
    pub fn tag(mut self, name: &str) -> Self {
        let tree = self.main().clone();
        self.revisions.insert(name.to_owned(), tree);
        self
    }

    /// States the licence of the model card.
    #[must_use]
    pub fn license(mut self, license: &str) -> Self {
        self.license = Some(license.to_owned());
        self
    }

    /// Anyone sees what there is; only who sends the token gets the files.
    #[must_use]
    pub fn gated(mut self, token: &str) -> Self {
        (self.access, self.token) = (Access::Gated, Some(token.to_owned()));
        self
    }

    /// Only who sends the token sees that it exists.
    #[must_use]
    pub fn private(mut self, token: &str) -> Self {
        (self.access, self.token) = (Access::Private, Some(token.to_owned()));
        self
    }

    /// How many entries a page of the file tree has at most.
    #[must_use]
    pub fn page(mut self, entries: usize) -> Self {
        self.page = entries.max(1);
        self
    }

    /// Small files are answered by a redirect (307) to another path of the hub, as the hub does behind its own cache.
    #[must_use]
    pub fn cached_redirects(mut self) -> Self {
        self.cached_redirects = true;
        self
    }

    /// Listings state these files, whatever there is.
    #[must_use]
    pub fn lists(mut self, listing: Vec<Listed>) -> Self {
        self.listing = Some(listing);
        self
    }

    /// What an honest listing of `main` states.
    pub fn listed(&self) -> Vec<Listed> {
        self.revisions["main"].iter().map(|(path, stored)| Listed::of(path, stored)).collect()
    }

    /// The commit of `main`: 40 hexadecimal digits that follow from its files.
    pub fn commit(&self) -> String {
        commit(&self.revisions["main"])
    }

    /// The files that a branch, tag or commit names, and their commit.
    pub(crate) fn at(&self, revision: &str) -> Option<(&Tree, String)> {
        let tree = self
            .revisions
            .get(revision)
            .or_else(|| self.revisions.values().find(|tree| commit(tree) == revision))?;
        Some((tree, commit(tree)))
    }

    pub(crate) fn listing(&self, tree: &Tree) -> Cow<'_, [Listed]> {
        let honest = || tree.iter().map(|(path, stored)| Listed::of(path, stored)).collect();
        self.listing.as_ref().map_or_else(|| Cow::Owned(honest()), |listing| listing.into())
    }

    /// A file in LFS of any revision, by its SHA-256.
    pub(crate) fn blob(&self, sha256: &str) -> Option<&Stored> {
        let stored = self.revisions.values().flat_map(Tree::values);
        stored.into_iter().find(|stored| stored.lfs.as_ref().is_some_and(|lfs| lfs.sha256 == sha256))
    }

    fn main(&mut self) -> &mut Tree {
        self.revisions.entry("main".to_owned()).or_default()
    }
}

fn commit(tree: &Tree) -> String {
    let lines: String = tree.iter().map(|(path, stored)| format!("{path}\0{}\n", stored.blob)).collect();
    Content::from(lines.as_str()).git_sha1().expect("it is in memory")
}

impl Stored {
    fn new(content: Content, lfs: bool) -> io::Result<Self> {
        if !lfs {
            let blob = content.git_sha1()?;
            return Ok(Self { content, blob, lfs: None });
        }
        let sha256 = content.sha256()?;
        let size = content.size();
        let pointer =
            format!("version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n");
        let blob = Content::from(pointer.as_str()).git_sha1()?;
        Ok(Self { content, blob, lfs: Some(Lfs { sha256, pointer_size: pointer.len() }) })
    }

    /// What the hub calls the ETag of the file: its SHA-256 in LFS, its Git SHA-1 otherwise.
    pub fn etag(&self) -> &str {
        self.lfs.as_ref().map_or(&self.blob, |lfs| &lfs.sha256)
    }
}

impl Listed {
    fn of(path: &str, stored: &Stored) -> Self {
        Self {
            path: path.to_owned(),
            size: stored.content.size().into(),
            blob: stored.blob.clone(),
            sha256: stored.lfs.as_ref().map(|lfs| lfs.sha256.clone()),
            pointer_size: stored.lfs.as_ref().map_or(0, |lfs| lfs.pointer_size),
        }
    }

    /// An entry of `siblings` in a model's information.
    pub(crate) fn sibling(&self, blobs: bool) -> Value {
        if !blobs {
            return json!({ "rfilename": self.path });
        }
        let mut sibling = json!({ "rfilename": self.path, "size": self.size, "blobId": self.blob });
        if let Some(sha256) = &self.sha256 {
            sibling["lfs"] = json!({ "sha256": sha256, "size": self.size, "pointerSize": self.pointer_size });
        }
        sibling
    }

    /// An entry of a file tree.
    pub(crate) fn entry(&self) -> Value {
        let mut entry = json!({ "type": "file", "oid": self.blob, "size": self.size, "path": self.path });
        if let Some(sha256) = &self.sha256 {
            entry["lfs"] = json!({ "oid": sha256, "size": self.size, "pointerSize": self.pointer_size });
        }
        entry
    }
}
