//! Dev mode: what `hapax serve` does where there is no config file. Every preset that can be signed
//! for is a source under its own name, with a secret of its own that is derived from the dev secret.
//! That one is random, kept in the data dir, and survives restarts. Loopback only: what one file
//! holds for all senders is no secret to put on the Internet.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Source, presets};

use super::handlers::Mode;
use super::problem::{InvalidSetting, Origin};
use super::reader::ConfigReader;
use super::secret_file;
use super::secret_file::SecretKind;
use super::settings::Settings;
use super::sources::{ConfiguredSource, keep_keys, unverified_limit_default};
use crate::signing;

/// What dev mode has beside ordinary settings.
#[derive(Debug, Clone)]
pub(crate) struct DevMode {
    /// Where it is kept.
    pub(crate) secret_file: PathBuf,
}

/// The name of the file in the data dir.
const SECRET_FILE: &str = "dev-secret";

/// Whether a secret is a dev secret, from which each sender's own is derived.
pub(crate) fn is_dev_secret(secret: &Secret) -> bool {
    SecretKind::DevSecret.has_form_of(secret)
}

/// The dev secret of a server that ran with this data dir before, if there is one.
pub(crate) fn dev_secret(data_dir: &Path) -> Option<Secret> {
    secret_file::read(&data_dir.join(SECRET_FILE), SecretKind::DevSecret).ok()
}

impl ConfigReader<'_> {
    /// Makes the sources of dev mode, and the secret if it is not there yet.
    pub(super) fn dev_mode(
        &mut self,
        settings: &mut Settings,
    ) -> (Vec<ConfiguredSource>, Option<DevMode>) {
        if !settings.listen.ip().is_loopback() {
            let invalid = InvalidSetting::new(
                format!(
                    "without a config file hapax is in dev mode, which listens on loopback \
                         only, and {} is not",
                    settings.listen
                ),
                "write a config with `hapax init` and give each source a secret of its own",
            );
            self.problems.add(Origin::Whole, "listen", invalid);
        }
        // Nothing is written to disk for a start that will be refused anyway.
        if !self.problems.is_empty() || self.environment.read_only {
            return (Vec::new(), None);
        }
        let file = settings.data_dir.join(SECRET_FILE);
        let secret = match secret_file::read_or_make(&file, SecretKind::DevSecret) {
            Ok(secret) => secret,
            Err(invalid) => {
                self.problems.add_unopened("data_dir", invalid);
                return (Vec::new(), None);
            }
        };
        if settings.public_url.is_none() {
            settings.public_url = Some(format!("http://{}", settings.listen));
        }
        let mut sources = Vec::new();
        for preset in presets::all().iter().filter(|preset| preset.can_sign()) {
            let Some(own) = signing::dev_secret(preset, secret.expose()) else { continue };
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
                    let invalid = InvalidSetting::new(error.problem, error.hint);
                    self.problems.add(Origin::Whole, preset.name, invalid);
                }
            }
        }
        (sources, Some(DevMode { secret_file: file }))
    }
}
