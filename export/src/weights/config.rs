use std::{io::Read, path::Path, sync::LazyLock};

use regex::Regex;
use serde::de::DeserializeOwned;

use super::WeightsError;
use crate::files::open_regular;

/// Largest JSON file that is read: configurations and shard indices are far smaller.
pub const MAX_JSON: u64 = 16 << 20;

/// An object key and the colon after it.
static KEY: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r#""((?:[^"\\]|\\.)*)"\s*:"#).ok());

/// Reads a JSON file (`config.json`, `scheduler_config.json`, ...) into `T`; errors name the file and the key.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, WeightsError> {
    let io = |source| WeightsError::Io { path: path.to_owned(), source };
    let (file, len) = open_regular(path).map_err(io)?;
    if len > MAX_JSON {
        return Err(WeightsError::JsonTooLarge { path: path.to_owned(), len, max: MAX_JSON });
    }
    let mut text = String::new();
    file.take(MAX_JSON).read_to_string(&mut text).map_err(io)?;
    serde_json::from_str(&text).map_err(|source| {
        let key = key_before(&text, source.line(), source.column());
        // What is missing is at no key: the error comes at the end of its object.
        let at_key = source.is_data() && !source.to_string().starts_with("missing field");
        WeightsError::Json { path: path.to_owned(), key: key.filter(|_| at_key), source }
    })
}

/// The last key that starts at or before a position (lines from 1, columns in bytes): the one whose value was refused.
fn key_before(text: &str, line: usize, column: usize) -> Option<String> {
    let line_start: usize = text.split_inclusive('\n').take(line.checked_sub(1)?).map(str::len).sum();
    let before = text.get(..text.len().min(line_start + column))?;
    let key = KEY.as_ref()?.captures_iter(before).last()?;
    Some(key[1].to_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Config {
        hidden_size: usize,
        axes: Vec<usize>,
    }

    fn read(text: &str) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        fs::write(&path, text).unwrap();
        read_json(&path).map_err(|e| e.to_string())
    }

    #[test]
    fn reads_the_fields_it_knows() {
        let config = read(r#"{"hidden_size": 2560, "axes": [1, 2], "extra": null}"#).unwrap();
        assert_eq!((config.hidden_size, config.axes), (2560, vec![1, 2]));
    }

    #[test]
    fn errors_name_file_and_key() {
        let wrong = read("{\n \"axes\": [1, 2],\n \"hidden_size\": \"big\"\n}").unwrap_err();
        assert!(wrong.contains("config.json: key `hidden_size`: invalid type"), "{wrong}");
        let nested = read(r#"{"hidden_size": 1, "axes": [1, -2], "later": 3}"#).unwrap_err();
        assert!(nested.contains("key `axes`"), "{nested}");
        let missing = read(r#"{"axes": []}"#).unwrap_err();
        assert!(missing.contains("config.json: missing field `hidden_size`"), "{missing}");
        let syntax = read(r#"{"axes": ["#).unwrap_err();
        assert!(syntax.contains("config.json") && syntax.contains("EOF"), "{syntax}");
        let absent = read_json::<Config>(&PathBuf::from("no/such.json")).unwrap_err().to_string();
        assert!(absent.contains("such.json"), "{absent}");
    }

    #[test]
    fn a_huge_file_is_refused_unread() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        fs::File::create(&path).unwrap().set_len(MAX_JSON + 1).unwrap();
        assert!(matches!(read_json::<Config>(&path), Err(WeightsError::JsonTooLarge { .. })));
    }
}
