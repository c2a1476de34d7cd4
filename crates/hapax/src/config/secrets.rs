//! Resolves a secret: `env:NAME`, `file:PATH` or the text itself. Errors name the variable or the file,
//! never the content.

use std::path::{Path, PathBuf};

use hapax_core::secret::Secret;

use super::problem::InvalidSetting;

/// A secret and the file it was read from, if any.
pub(crate) struct Resolved {
    /// The value.
    pub(crate) secret: Secret,
    /// The file to watch.
    pub(crate) file: Option<PathBuf>,
}

/// The largest secret file; certificates and key sets are far smaller.
const SECRET_FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads a secret. `env` looks up an environment variable.
pub(crate) fn resolve(
    text: &str,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Resolved, InvalidSetting> {
    let resolved = if let Some(name) = text.strip_prefix("env:") {
        Resolved { secret: Secret::new(from_env(name, env)?), file: None }
    } else if let Some(path) = text.strip_prefix("file:") {
        let path = PathBuf::from(path);
        Resolved { secret: Secret::new(from_file(&path)?), file: Some(path) }
    } else {
        Resolved { secret: Secret::new(text), file: None }
    };
    if resolved.secret.expose().trim().is_empty() {
        let problem = match &resolved.file {
            Some(path) => format!("is empty: {} has no content", path.display()),
            None if text.starts_with("env:") => {
                format!("is empty: the variable of {text} is empty")
            }
            None => "is empty".to_owned(),
        };
        return Err(InvalidSetting::new(
            problem,
            "set the secret: with an empty one anyone could sign",
        ));
    }
    Ok(resolved)
}

fn from_env(name: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, InvalidSetting> {
    let starts_well = name.bytes().next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    if !starts_well || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        // The text may be the secret itself, so it is not quoted.
        return Err(InvalidSetting::new(
            "the text after env: is not the name of an environment variable",
            "write \"env:STRIPE_SECRET\", and set STRIPE_SECRET in the environment of hapax",
        ));
    }
    env(name).ok_or_else(|| {
        InvalidSetting::new(
            format!("environment variable {name} is not set"),
            format!("set {name} in the environment of hapax, or use file:PATH"),
        )
    })
}

/// Reads a file without one newline at its end, which editors add; other whitespace is kept.
fn from_file(path: &Path) -> Result<String, InvalidSetting> {
    let cannot = |why: String| {
        InvalidSetting::new(
            format!("cannot read {}: {why}", path.display()),
            "make the file readable for the user that runs hapax",
        )
    };
    let about = std::fs::metadata(path).map_err(|error| cannot(error.to_string()))?;
    if !about.is_file() {
        return Err(cannot("not a regular file".to_owned()));
    }
    if about.len() > SECRET_FILE_BYTES_MAX {
        return Err(cannot(format!("larger than {SECRET_FILE_BYTES_MAX} bytes")));
    }
    let mut text = std::fs::read_to_string(path).map_err(|error| cannot(error.to_string()))?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Result<String, InvalidSetting> {
        let env = |name: &str| match name {
            "FULL" => Some("s3cret".to_owned()),
            "BLANK" => Some("  ".to_owned()),
            _unset => None,
        };
        resolve(text, &env).map(|resolved| resolved.secret.expose().to_owned())
    }

    #[test]
    fn a_secret_comes_from_the_environment_a_file_or_the_text() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, " from file \r\n").unwrap();
        assert_eq!(value("env:FULL").as_deref(), Ok("s3cret"));
        assert_eq!(value(&format!("file:{}", path.display())).as_deref(), Ok(" from file "));
        assert_eq!(value("literal").as_deref(), Ok("literal"));
    }

    #[test]
    fn an_empty_or_unreadable_secret_is_refused_and_never_quoted() {
        for bad in ["", "  ", "env:BLANK", "env:UNSET", "env:", "file:/nowhere/at/all", "file:/"] {
            assert!(value(bad).is_err(), "{bad:?}");
        }
        let invalid = value("env:whsec-abc/def").unwrap_err();
        assert!(!format!("{invalid:?}").contains("abc"));
    }
}
