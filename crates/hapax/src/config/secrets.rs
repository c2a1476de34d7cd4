//! Where a secret comes from: `env:NAME`, `file:PATH`, or the text itself. Errors name the variable
//! or the file, never what is in it.

use std::path::{Path, PathBuf};

use hapax_core::secret::Secret;

use super::problem::InvalidSetting;

/// A value and, where it was read from a file, that file, so that a change to it is noticed.
pub(crate) struct Resolved {
    /// The value.
    pub(crate) secret: Secret,
    /// The file to watch.
    pub(crate) file: Option<PathBuf>,
}

/// The longest secret file that is read: certificates and key sets fit many times over.
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
            Some(path) => format!("is empty: nothing in {}", path.display()),
            None if text.starts_with("env:") => format!("is empty: {text} is set to nothing"),
            None => "is empty".to_owned(),
        };
        return Err(InvalidSetting::new(problem, "an empty secret would let anyone sign"));
    }
    Ok(resolved)
}

fn from_env(name: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, InvalidSetting> {
    let starts_well = name.bytes().next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    if !starts_well || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        // What stands there may be the secret itself, so it is not repeated.
        return Err(InvalidSetting::new(
            "what follows env: is not the name of an environment variable",
            "write \"env:STRIPE_SECRET\", and set STRIPE_SECRET where hapax runs",
        ));
    }
    env(name).ok_or_else(|| {
        InvalidSetting::new(
            format!("environment variable {name} is not set"),
            format!("set {name} where hapax runs, or use file:PATH"),
        )
    })
}

/// One newline at the end is the editor's, not the secret's; every other blank is kept.
fn from_file(path: &Path) -> Result<String, InvalidSetting> {
    let cannot = |why: String| {
        InvalidSetting::new(
            format!("cannot read {}: {why}", path.display()),
            "the file must exist and be readable by the user hapax runs as",
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
    fn what_is_empty_or_cannot_be_read_is_refused_and_never_repeated() {
        for bad in ["", "  ", "env:BLANK", "env:UNSET", "env:", "file:/nowhere/at/all", "file:/"] {
            assert!(value(bad).is_err(), "{bad:?}");
        }
        let invalid = value("env:whsec-abc/def").unwrap_err();
        assert!(!format!("{invalid:?}").contains("abc"));
    }
}
