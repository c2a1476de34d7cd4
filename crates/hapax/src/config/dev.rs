//! Dev mode: what `hapax serve` does where there is no config file. Every preset that can be signed
//! for is a source under its own name, all with one random secret that is kept in the data dir and
//! survives restarts. Loopback only: a secret that all sources share proves little.

use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Source, presets};

use super::handlers::Mode;
use super::problem::{Complaint, Place};
use super::sources::{ConfiguredSource, keep_keys, unverified_limit_default};
use super::{Reading, Settings};
use crate::signing;

/// What dev mode has beside ordinary settings.
#[derive(Debug, Clone)]
pub(crate) struct DevMode {
    /// Where it is kept.
    pub(crate) secret_file: PathBuf,
}

/// The name of the file in the data dir.
pub(crate) const SECRET_FILE: &str = "dev-secret";

impl Reading<'_> {
    /// Makes the sources of dev mode, and the secret if it is not there yet.
    pub(super) fn dev_mode(
        &mut self,
        settings: &mut Settings,
    ) -> (Vec<ConfiguredSource>, Option<DevMode>) {
        if !settings.listen.ip().is_loopback() {
            let complaint = Complaint::new(
                format!(
                    "without a config file hapax is in dev mode, which listens on loopback \
                         only, and {} is not",
                    settings.listen
                ),
                "write a config with `hapax init` and give each source a secret of its own",
            );
            self.problems.add(Place::Whole, "listen", complaint);
        }
        // Nothing is written to disk for a start that will be refused anyway.
        if !self.problems.is_empty() || self.world.only_looks {
            return (Vec::new(), None);
        }
        let secret_file = settings.data_dir.join(SECRET_FILE);
        let secret = match read_or_make(&secret_file) {
            Ok(secret) => secret,
            Err(complaint) => {
                self.problems.add(Place::Whole, "data_dir", complaint);
                return (Vec::new(), None);
            }
        };
        if settings.public_url.is_none() {
            settings.public_url = Some(format!("http://{}", settings.listen));
        }
        let mut sources = Vec::new();
        for preset in presets::all().iter().filter(|preset| preset.can_sign()) {
            let own = Secret::new(signing::dev_secret(preset, secret.expose()));
            let mut spec =
                SourceSpec::new(preset.name, preset.name, vec![ActiveSecret::forever(own)]);
            spec.params = signing::dev_params(preset, secret.expose());
            match Source::build(spec) {
                Ok(source) => sources.push(ConfiguredSource {
                    keep_keys: keep_keys(settings, &source),
                    source: Arc::new(source),
                    provider: preset.name.to_owned(),
                    path: format!("/webhooks/{}", preset.name),
                    rate_limit: None,
                    unverified_limit: unverified_limit_default(),
                    secrets_until: vec![None],
                    handlers: Vec::new(),
                    mode: Mode::Async,
                }),
                Err(error) => {
                    let complaint = Complaint::new(error.problem, error.hint);
                    self.problems.add(Place::Whole, preset.name, complaint);
                }
            }
        }
        (sources, Some(DevMode { secret_file }))
    }
}

fn read_or_make(path: &Path) -> Result<Secret, Complaint> {
    match make(path) {
        Ok(secret) => Ok(secret),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => read(path),
        Err(error) => Err(Complaint::new(
            format!("cannot keep the dev secret in {}: {error}", path.display()),
            "choose a directory that can be written with --data-dir",
        )),
    }
}

/// Reads the dev secret of a server that ran before.
pub(crate) fn read(path: &Path) -> Result<Secret, Complaint> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Complaint::new(
            format!("cannot read the dev secret in {}: {error}", path.display()),
            "it must be readable by the user hapax runs as",
        )
    })?;
    let secret = Secret::new(text.trim_end());
    if looks_like_one(&secret) {
        return Ok(secret);
    }
    Err(Complaint::new(
        format!("{} does not hold 64 hex digits", path.display()),
        "remove it, and the next start makes a new one",
    ))
}

/// Whether a secret has the form of a dev secret: 64 lower-case hex digits.
pub(crate) fn looks_like_one(secret: &Secret) -> bool {
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    secret.expose().len() == 64 && secret.expose().bytes().all(is_hex)
}

/// Creates the file, readable by its owner only; fails where it exists.
fn make(path: &Path) -> std::io::Result<Secret> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    let mut bytes = [0; 32];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| std::io::Error::other("no randomness"))?;
    let secret = Secret::new(hex::encode(bytes));
    let written = writeln!(file, "{}", secret.expose()).and_then(|()| file.sync_all());
    if let Err(error) = written {
        // A file without its secret would be refused even when the disk has room again.
        let _ = std::fs::remove_file(path);
        return Err(error);
    }
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dev_secret_is_made_once_and_only_its_owner_can_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data").join(SECRET_FILE);
        let first = read_or_make(&path).unwrap();
        let second = read_or_make(&path).unwrap();
        assert_eq!(first.expose(), second.expose());
        assert_eq!(first.expose().len(), 64);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }

    #[test]
    fn a_damaged_dev_secret_is_refused_rather_than_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(SECRET_FILE);
        std::fs::write(&path, "half").unwrap();
        assert!(read_or_make(&path).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "half");
    }
}
