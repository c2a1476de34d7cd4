//! A random secret that a server creates in its data directory at its first start: 32 random bytes, written
//! as its kind demands. Only its owner can read the file.

use std::io::{Error, ErrorKind, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hapax_core::secret::Secret;
use hapax_core::vault::VaultKey;

use super::problem::InvalidSetting;

/// The kinds of secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SecretKind {
    /// The token of the admin side.
    AdminToken,
    /// The secret from which the secrets of all senders are derived in dev mode. Its prefix distinguishes
    /// it from other secrets.
    DevSecret,
    /// The key of the vault, in base64 as in the config.
    VaultKey,
}

impl SecretKind {
    fn title(self) -> &'static str {
        match self {
            Self::AdminToken => "the admin token",
            Self::DevSecret => "the dev secret",
            Self::VaultKey => "the vault key",
        }
    }

    /// The form, for errors.
    fn form(self) -> &'static str {
        match self {
            Self::AdminToken => "64 hex digits",
            Self::DevSecret => "dev_ and 64 hex digits",
            Self::VaultKey => "32 bytes in base64",
        }
    }

    /// The advice for a file that holds something else.
    fn repair(self) -> &'static str {
        match self {
            Self::AdminToken | Self::DevSecret => {
                "remove the file; the next start creates a new secret"
            }
            Self::VaultKey => {
                "restore the file from a backup: without its key the secrets of endpoints in the database \
                 cannot be read"
            }
        }
    }

    /// The secret with these random bytes.
    fn write(self, random: &[u8; 32]) -> Secret {
        Secret::new(match self {
            Self::AdminToken => hex::encode(random),
            Self::DevSecret => format!("dev_{}", hex::encode(random)),
            Self::VaultKey => STANDARD.encode(random),
        })
    }

    /// Whether a secret has the form of its kind.
    pub(crate) fn has_form_of(self, secret: &Secret) -> bool {
        let is_hex = |digits: &str| {
            let mut bytes = digits.bytes();
            digits.len() == 64 && bytes.all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        match self {
            Self::AdminToken => is_hex(secret.expose()),
            Self::DevSecret => secret.expose().strip_prefix("dev_").is_some_and(is_hex),
            Self::VaultKey => VaultKey::from_base64(secret.expose()).is_ok(),
        }
    }
}

/// Reads the secret in `path`, or creates it. Two processes that start at once get the same secret.
pub(super) fn read_or_make(path: &Path, kind: SecretKind) -> Result<Secret, InvalidSetting> {
    match make(path, kind) {
        Ok(secret) => Ok(secret),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => read(path, kind),
        Err(error) => Err(InvalidSetting::new(
            format!("cannot write {} to {}: {error}", kind.title(), path.display()),
            "pass a writable directory with --data-dir",
        )),
    }
}

/// Reads an existing secret.
pub(crate) fn read(path: &Path, kind: SecretKind) -> Result<Secret, InvalidSetting> {
    let read = || {
        let text = std::fs::read_to_string(path)?;
        let mode = std::fs::metadata(path)?.permissions().mode();
        Ok::<_, Error>((text, mode))
    };
    let (text, mode) = read().map_err(|error| {
        InvalidSetting::new(
            format!("cannot read {} from {}: {error}", kind.title(), path.display()),
            "make the file readable for the user that runs hapax",
        )
    })?;
    if mode & 0o077 != 0 {
        // A backup or a copy may have widened the permissions. A reader that does not own the file cannot
        // change them, and that is not an error.
        let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600));
    }
    let secret = Secret::new(text.trim_end());
    if kind.has_form_of(&secret) {
        return Ok(secret);
    }
    Err(InvalidSetting::new(
        format!("{} does not hold {}", path.display(), kind.form()),
        kind.repair(),
    ))
}

/// Creates the file, or fails if it exists. The file appears whole or not at all: it is written and synced
/// under another name and then linked, which never replaces an existing file.
fn make(path: &Path, kind: SecretKind) -> std::io::Result<Secret> {
    if path.try_exists()? {
        return Err(ErrorKind::AlreadyExists.into());
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    hapax_store::private_dir(directory)?;
    let no_randomness = |_| Error::other("the system has no random numbers");
    let mut bytes = [0; 32];
    aws_lc_rs::rand::fill(&mut bytes).map_err(no_randomness)?;
    let secret = kind.write(&bytes);
    let mut suffix = [0; 8];
    aws_lc_rs::rand::fill(&mut suffix).map_err(no_randomness)?;
    let draft = directory.join(format!(".hapax-{}", hex::encode(suffix)));
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let written = options.open(&draft).and_then(|mut file| {
        writeln!(file, "{}", secret.expose())?;
        file.sync_all()
    });
    let linked = written.and_then(|()| std::fs::hard_link(&draft, path));
    let _ = std::fs::remove_file(&draft);
    linked?;
    // Without this sync a power loss could remove the name, and the next start would create another secret.
    std::fs::File::open(directory)?.sync_all()?;
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_made_once_and_only_its_owner_can_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data").join("secret");
        let made: Vec<_> = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| read_or_make(&path, SecretKind::AdminToken).unwrap()))
                .collect();
            racers.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        let again = read_or_make(&path, SecretKind::AdminToken).unwrap();
        assert!(made.iter().all(|made| made.expose() == again.expose()));
        assert_eq!(again.expose().len(), 64);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_others_could_read_is_narrowed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, format!("{}\n", "ab".repeat(32))).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(read_or_make(&path, SecretKind::AdminToken).is_ok());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_damaged_secret_is_refused_rather_than_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "half").unwrap();
        assert!(read_or_make(&path, SecretKind::AdminToken).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "half");
    }
}
