//! Dev mode: `hapax serve` without a config file. Every preset whose events Hapax can sign is a source
//! under its own name, with a secret that is derived from the dev secret. The dev secret is random and is
//! kept in the data dir. Dev mode listens on loopback only, because one file holds the secrets of all
//! senders. Endpoints may be on loopback, too.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::{Source, presets};
use hapax_engine::AnswerMode;

use super::problem::{InvalidSetting, SettingOrigin};
use super::reader::ConfigReader;
use super::secret_file;
use super::secret_file::SecretKind;
use super::settings::Settings;
use super::sources::{
    ConfiguredSource, ConfiguredSources, Redaction, SourceTemplate, keep_keys, secret_text_hash,
    unverified_limit_default,
};
use crate::signing;

/// The extra settings of dev mode.
#[derive(Debug, Clone)]
pub(crate) struct DevMode {
    /// The file of the dev secret.
    pub(crate) secret_file: PathBuf,
}

/// The name of the file in the data dir.
const SECRET_FILE: &str = "dev-secret";

/// Whether a secret has the form of a dev secret.
pub(crate) fn is_dev_secret(secret: &Secret) -> bool {
    SecretKind::DevSecret.has_form_of(secret)
}

/// The dev secret in this data dir, if there is one.
pub(crate) fn dev_secret(data_dir: &Path) -> Option<Secret> {
    secret_file::read(&data_dir.join(SECRET_FILE), SecretKind::DevSecret).ok()
}

impl ConfigReader<'_> {
    /// Builds the sources of dev mode; creates the dev secret if it is missing.
    pub(super) fn dev_mode(
        &mut self,
        settings: &mut Settings,
    ) -> (ConfiguredSources, Option<DevMode>) {
        settings.outbound.allow_loopback();
        if !settings.listen.ip().is_loopback() {
            let invalid = InvalidSetting::new(
                format!(
                    "{} is not loopback, and without a config file hapax runs in dev mode, which \
                         listens on loopback only",
                    settings.listen
                ),
                "write a config with `hapax init`, and give each source its own secret",
            );
            self.problems.add(SettingOrigin::Whole, "listen", invalid);
        }
        // No file is created for a start that fails anyway.
        if !self.problems.is_empty() || self.environment.read_only {
            return (ConfiguredSources::default(), None);
        }
        let file = settings.data_dir.join(SECRET_FILE);
        let secret = match secret_file::read_or_make(&file, SecretKind::DevSecret) {
            Ok(secret) => secret,
            Err(invalid) => {
                self.problems.add_unopened("data_dir", invalid);
                return (ConfiguredSources::default(), None);
            }
        };
        if settings.public_url.is_none() {
            settings.public_url = Some(format!("http://{}", settings.listen));
        }
        let mut sources = ConfiguredSources::default();
        for preset in presets::all().iter().filter(|preset| preset.can_sign()) {
            let Some(own) = signing::dev_secret(preset, secret.expose()) else { continue };
            let mut spec = SourceSpec::new(preset.name, preset.name, Vec::new());
            spec.params = signing::dev_params(preset, secret.expose());
            let secret_texts = vec![secret_text_hash(&own)];
            let secrets = vec![ActiveSecret::forever(own).known_as("dev-secret")];
            match Source::build(SourceSpec { secrets, ..spec.clone() }) {
                Ok(source) => {
                    let keep_keys = keep_keys(settings, &source);
                    sources.pairs.push(ConfiguredSource {
                        source: Arc::new(source),
                        provider: preset.name.to_owned(),
                        path: format!("/webhooks/{}", preset.name),
                        rate_limit: None,
                        unverified_limit: unverified_limit_default(),
                        secrets_until: vec![None],
                        secret_texts,
                        handlers: Vec::new(),
                        mode: AnswerMode::Async,
                    });
                    sources.templates.push(SourceTemplate {
                        spec,
                        rate_limit: None,
                        unverified_limit: unverified_limit_default(),
                        keep_keys,
                        handlers: Vec::new(),
                        mode: AnswerMode::Async,
                        search: Vec::new(),
                        redact: Redaction::default(),
                    });
                }
                Err(error) => {
                    let invalid = InvalidSetting::new(error.problem, error.hint);
                    self.problems.add(SettingOrigin::Whole, preset.name, invalid);
                }
            }
        }
        (sources, Some(DevMode { secret_file: file }))
    }
}
