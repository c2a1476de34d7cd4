//! `[vault]`: the keys that seal the secrets of endpoints and tenants in the database, and the file with the
//! key that a server creates if the config names none.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use hapax_core::handler::Dialect;
use hapax_core::vault::{KeyId, Vault, VaultKey};

use super::document::{Entry, Section};
use super::problem::InvalidSetting;
use super::reader::ConfigReader;
use super::secret_file::{self, SecretKind};
use super::settings::Settings;
use super::shared::Role;

/// `[vault]`.
#[derive(Debug)]
pub(crate) struct VaultSettings {
    /// The key that seals.
    pub(crate) key: VaultKeySource,
    /// The keys that it replaced, which only open values.
    pub(crate) old: Vec<VaultKey>,
}

/// Where the key that seals comes from.
#[derive(Debug)]
pub(crate) enum VaultKeySource {
    /// The config.
    Configured(VaultKey),
    /// The file that the first start creates. Only one process uses the data directory.
    File(VaultFile),
    /// Nodes share a PostgreSQL, and the config names no key. A key that one node created would be unknown to
    /// the others, so endpoints cannot be stored.
    Missing,
}

/// The file with the key of a server whose config names none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VaultFile(PathBuf);

/// The state of the file, found without changing it.
#[derive(Debug)]
pub(crate) enum VaultFileState {
    /// There is no file.
    Absent,
    /// The file holds a key.
    Key {
        /// The key.
        key: VaultKey,
        /// Whether other users can read the file.
        readable_by_others: bool,
    },
    /// The file cannot be used.
    Unusable(String),
}

/// Every key of `[vault]`.
pub(super) const KEYS: [&str; 2] = ["key", "old"];

/// The name of the file in the data dir.
const VAULT_FILE: &str = "vault.key";

/// The warning about [`VaultKeySource::Missing`].
pub(crate) const NO_VAULT_KEY: &str = "[vault] has no key, so the secrets of endpoints and tenants cannot be stored; make a key with `openssl \
     rand -base64 32`, and set key = \"env:HAPAX_VAULT_KEY\" on every node";

const HINT: &str = "make a key with `openssl rand -base64 32`";

impl VaultSettings {
    /// Opens the vault, or returns `None` if no key is configured and none may be created.
    ///
    /// `may_create` says that the database holds no sealed value. Otherwise a missing file is an error: a new
    /// key would open none of these values. Only servers call this, after the database is open, so that a
    /// failed start leaves no file behind.
    pub(crate) fn open(&self, may_create: bool) -> Result<Option<Vault>, InvalidSetting> {
        let current = match &self.key {
            VaultKeySource::Configured(key) => key.clone(),
            VaultKeySource::File(file) => file.open_or_create(may_create)?,
            VaultKeySource::Missing => return Ok(None),
        };
        Vault::new(current, self.old.clone()).map(Some).map_err(|repeated| {
            InvalidSetting::new(repeated.to_string(), "remove it from `old` in [vault]")
        })
    }
}

impl VaultSettings {
    /// The ids of all keys that are known without creating a file, the current one first.
    pub(crate) fn known_keys(&self) -> Vec<KeyId> {
        let current = match &self.key {
            VaultKeySource::Configured(key) => Some(key.id()),
            VaultKeySource::File(file) => match file.state() {
                VaultFileState::Key { key, .. } => Some(key.id()),
                VaultFileState::Absent | VaultFileState::Unusable(_) => None,
            },
            VaultKeySource::Missing => None,
        };
        current.into_iter().chain(self.old.iter().map(VaultKey::id)).collect()
    }
}

impl VaultFile {
    /// The file in this data dir.
    pub(crate) fn in_dir(data_dir: &Path) -> Self {
        Self(data_dir.join(VAULT_FILE))
    }

    /// The path.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Reads the key. If there is no file and `may_create` is set, creates it: whole, synced, and readable
    /// only by its owner. Two processes that start at once get the same key.
    pub(crate) fn open_or_create(&self, may_create: bool) -> Result<VaultKey, InvalidSetting> {
        let secret = match may_create {
            true => secret_file::read_or_make(&self.0, SecretKind::VaultKey)?,
            false => self.read_existing()?,
        };
        VaultKey::from_base64(secret.expose())
            .map_err(|error| InvalidSetting::new(format!("{} {error}", self.0.display()), HINT))
    }

    fn read_existing(&self) -> Result<hapax_core::secret::Secret, InvalidSetting> {
        if let Ok(false) = self.0.try_exists() {
            return Err(InvalidSetting::new(
                format!(
                    "{} does not exist, and the database holds secrets that are sealed with its key",
                    self.0.display()
                ),
                "restore the file from a backup, or set the key in [vault]",
            ));
        }
        secret_file::read(&self.0, SecretKind::VaultKey)
    }

    /// Reads the file and changes nothing.
    pub(crate) fn state(&self) -> VaultFileState {
        let read = || {
            let mode = std::fs::metadata(&self.0)?.permissions().mode();
            Ok::<_, std::io::Error>((std::fs::read_to_string(&self.0)?, mode))
        };
        match read() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => VaultFileState::Absent,
            Err(error) => VaultFileState::Unusable(error.to_string()),
            Ok((text, mode)) => match VaultKey::from_base64(&text) {
                Ok(key) => VaultFileState::Key { key, readable_by_others: mode & 0o077 != 0 },
                Err(error) => VaultFileState::Unusable(error.to_string()),
            },
        }
    }
}

impl ConfigReader<'_> {
    /// Reads `[vault]`. `is_dev` is set without a config file: then the key is in the data dir, beside the dev
    /// secret, on either database.
    pub(super) fn vault(
        &mut self,
        root: &Section<'_>,
        settings: &Settings,
        is_dev: bool,
    ) -> VaultSettings {
        let section = root.get("vault").and_then(|entry| entry.section(&mut self.problems));
        if let Some(section) = &section {
            section.expect(&KEYS, &mut self.problems);
        }
        let entry = |name: &str| section.as_ref().and_then(|section| section.get(name));
        let key_entry = entry("key");
        let key = key_entry.as_ref().and_then(|entry| self.vault_key(entry));
        let mut old: Vec<VaultKey> = Vec::new();
        let old_entry = entry("old");
        let entries = old_entry.as_ref().and_then(|entry| entry.list(&mut self.problems));
        for entry in entries.unwrap_or_default() {
            let Some(replaced) = self.vault_key(&entry) else { continue };
            if key.as_ref().is_some_and(|key| key.id() == replaced.id()) {
                let invalid = InvalidSetting::new(
                    "is the same as `key`",
                    "list only keys that `key` has replaced; the new key belongs in `key`",
                );
                entry.report(invalid, &mut self.problems);
            } else if old.iter().any(|other| other.id() == replaced.id()) {
                let invalid = InvalidSetting::new("is listed twice", "remove one of them");
                entry.report(invalid, &mut self.problems);
            } else {
                old.push(replaced);
            }
        }
        let is_shared = !is_dev && self.dialect == Dialect::Postgres;
        if let Some(entry) = old_entry.filter(|_| is_shared && key_entry.is_none()) {
            let invalid = InvalidSetting::new(
                "needs `key`: on a shared PostgreSQL every node needs the key that seals",
                format!("add key = \"env:HAPAX_VAULT_KEY\"; {HINT}"),
            );
            entry.report(invalid, &mut self.problems);
        }
        let key = match (key, is_shared) {
            (Some(key), _) => VaultKeySource::Configured(key),
            (None, false) => VaultKeySource::File(VaultFile::in_dir(&settings.data_dir)),
            (None, true) => VaultKeySource::Missing,
        };
        let stores_secrets =
            [Role::Sender, Role::Admin].iter().any(|role| settings.roles.has(*role));
        if matches!(key, VaultKeySource::Missing) && stores_secrets && key_entry.is_none() {
            self.warnings.push(NO_VAULT_KEY.to_owned());
        }
        VaultSettings { key, old }
    }

    fn vault_key(&mut self, entry: &Entry<'_>) -> Option<VaultKey> {
        let secret = self.secret(entry)?;
        let key = VaultKey::from_base64(secret.expose());
        let invalid = |error| InvalidSetting::new(format!("{error}"), HINT);
        key.map_err(|error| entry.report(invalid(error), &mut self.problems)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_start_creates_one_key_and_every_later_one_reads_it() {
        // Several starts race for the file. With a second key, values that the first one sealed could
        // not be read.
        let dir = tempfile::tempdir().unwrap();
        let file = VaultFile::in_dir(&dir.path().join("data"));
        assert!(matches!(file.state(), VaultFileState::Absent));
        let made: Vec<_> = std::thread::scope(|scope| {
            let racers: Vec<_> =
                (0..8).map(|_| scope.spawn(|| file.open_or_create(true).unwrap().id())).collect();
            racers.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        for may_create in [true, false] {
            let again = file.open_or_create(may_create).unwrap().id();
            assert!(made.iter().all(|made| *made == again));
        }
        let VaultFileState::Key { key, readable_by_others: false } = file.state() else {
            panic!("{:?}", file.state())
        };
        assert_eq!(key.id(), made[0]);
        // The text of the file is also valid as `key` in the config.
        let text = std::fs::read_to_string(file.path()).unwrap();
        assert_eq!(VaultKey::from_base64(&text).map(|key| key.id()), Ok(made[0]));
    }

    #[test]
    fn a_key_that_is_gone_or_damaged_is_not_replaced_while_the_database_holds_sealed_values() {
        // A data directory was restored without its key file, and another one with a damaged key file.
        let dir = tempfile::tempdir().unwrap();
        let file = VaultFile::in_dir(dir.path());
        let refused = file.open_or_create(false).unwrap_err();
        assert!(refused.problem.contains("does not exist"), "{refused:?}");
        assert!(refused.hint.contains("backup"), "{refused:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        std::fs::write(file.path(), "aGFsZg==\n").unwrap();
        for may_create in [true, false] {
            let refused = file.open_or_create(may_create).unwrap_err();
            assert!(refused.hint.contains("backup"), "{refused:?}");
            assert!(!format!("{refused:?}").contains("aGFsZg"), "{refused:?}");
        }
        assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "aGFsZg==\n");
        assert!(matches!(file.state(), VaultFileState::Unusable(_)));
    }

    #[test]
    fn looking_at_a_file_that_others_can_read_reports_it_and_opening_narrows_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = VaultFile::in_dir(dir.path());
        file.open_or_create(true).unwrap();
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
        let is_wide =
            || matches!(file.state(), VaultFileState::Key { readable_by_others: true, .. });
        assert!(is_wide() && is_wide());
        file.open_or_create(false).unwrap();
        assert!(!is_wide());
    }

    #[test]
    fn the_key_in_the_file_cannot_be_an_old_key_as_well() {
        // `old = ["file:hapax-data/vault.key"]` without a `key`: the file is the current key.
        let dir = tempfile::tempdir().unwrap();
        let file = VaultFile::in_dir(dir.path());
        let key = file.open_or_create(true).unwrap();
        let of =
            |old: Vec<VaultKey>| VaultSettings { key: VaultKeySource::File(file.clone()), old };
        assert!(of(vec![key.clone()]).open(true).is_err());
        let vault = of(Vec::new()).open(false).unwrap().unwrap();
        assert_eq!(vault.current_key_id(), key.id());
        let shared = VaultSettings { key: VaultKeySource::Missing, old: Vec::new() };
        assert!(shared.open(true).unwrap().is_none());
    }
}
