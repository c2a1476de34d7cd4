//! `[sources.NAME]`: reads each source, resolves its secrets, and builds a verifier for every declared
//! (tenant, source) pair.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use hapax_core::envelope::{EnvelopeSpec, IdSpec};
use hapax_core::handler::Handler;
use hapax_core::json::{POINTERS_MAX, Pointer};
use hapax_core::limits::SEARCH_FIELDS_MAX;
use hapax_core::message::{OWN_TENANT, own_tenant_fault};
use hapax_core::presets::{self, Preset, PresetGuard};
use hapax_core::scheme::CustomScheme;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::{LatePolicy, ReplayGuard, SourceError, SourceSpec};
use hapax_core::{KeyHash, Source, SourceName, Tenant, Timestamp};
use hapax_engine::{AnswerMode, Rate};

use super::document::{Entry, Section};
use super::problem::InvalidSetting;
use super::reader::ConfigReader;
use super::settings::{KEEP_DEFAULT, Settings};
use super::units::{self, Keep};
use crate::signing;

/// One (tenant, source) pair.
#[derive(Debug)]
pub(crate) struct ConfiguredSource {
    /// The verifier.
    pub(crate) source: Arc<Source>,
    /// A preset's name, or `custom`.
    pub(crate) provider: String,
    /// Its route: `/webhooks/stripe`, or `/webhooks/acme/stripe`.
    pub(crate) path: String,
    /// The rate limit of verified events; `None` is no limit.
    pub(crate) rate_limit: Option<Rate>,
    /// The rate limit of failed verifications per client address; `None` is no limit.
    pub(crate) unverified_limit: Option<Rate>,
    /// When each of its secrets expires; `None` is never.
    pub(crate) secrets_until: Vec<Option<Timestamp>>,
    /// The hash of the text of each of its secrets.
    pub(crate) secret_texts: Vec<KeyHash>,
    /// Its handlers, the same for every tenant.
    pub(crate) handlers: Vec<Arc<Handler>>,
    /// When the sender is answered.
    pub(crate) mode: AnswerMode,
}

/// A source without the secrets of a tenant: a tenant that is added at run time gets a pair like it.
#[derive(Debug, Clone)]
pub(crate) struct SourceTemplate {
    /// The spec of the source for the default tenant, without secrets.
    pub(crate) spec: SourceSpec,
    /// As in [`ConfiguredSource`].
    pub(crate) rate_limit: Option<Rate>,
    /// As in [`ConfiguredSource`].
    pub(crate) unverified_limit: Option<Rate>,
    /// How long duplicates of this source are recognised. The time is unlimited if it cannot be
    /// decided without a secret.
    pub(crate) keep_keys: Keep,
    /// As in [`ConfiguredSource`].
    pub(crate) handlers: Vec<Arc<Handler>>,
    /// As in [`ConfiguredSource`].
    pub(crate) mode: AnswerMode,
    /// The indexed values, which a search finds at once.
    pub(crate) search: Vec<Pointer>,
    /// The values that are masked for tokens without `payload`.
    pub(crate) redact: Redaction,
}

/// Values that are masked where events are shown.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Redaction {
    /// The values in a JSON body.
    pub(crate) pointers: Vec<Pointer>,
    /// Names of headers.
    pub(crate) headers: Vec<String>,
}

impl SourceTemplate {
    /// The source for a tenant with these secrets.
    pub(crate) fn source_for(
        &self,
        tenant: Tenant,
        secrets: Vec<ActiveSecret>,
    ) -> Result<Source, SourceError> {
        let reference = format!("tenant {tenant}");
        let known = |secret: ActiveSecret| match secret.reference {
            Some(_) => secret,
            None => secret.known_as(reference.as_str()),
        };
        let secrets = secrets.into_iter().map(known).collect();
        Source::build(SourceSpec { tenant, secrets, ..self.spec.clone() })
    }
}

/// The sources that `[sources]` declares.
#[derive(Debug, Default)]
pub(crate) struct ConfiguredSources {
    /// One entry for each (tenant, source) pair.
    pub(crate) pairs: Vec<ConfiguredSource>,
    /// One template for each source.
    pub(crate) templates: Vec<SourceTemplate>,
}

/// The hash of a secret's text, to find pairs that share one.
pub(crate) fn secret_text_hash(secret: &Secret) -> KeyHash {
    KeyHash::of(b"secret", [secret.expose().as_bytes()])
}

/// The default of `unverified_limit`: above a sender with a wrong secret, below a flood.
pub(super) fn unverified_limit_default() -> Option<Rate> {
    units::rate("100/s").unwrap_or_default()
}

/// How long duplicates of a source are recognised.
pub(super) fn keep_keys(settings: &Settings, source: &Source) -> Keep {
    let default = if source.signs_time() { KEEP_DEFAULT } else { Keep::Forever };
    settings.retention.keys.unwrap_or(default)
}

const KEYS: [&str; 21] = [
    "provider",
    "secrets",
    "params",
    "tolerance",
    "late",
    "replay_guard",
    "mode",
    "sync_timeout",
    "rate_limit",
    "unverified_limit",
    "event_id",
    "event_type",
    "occurred_at",
    "items",
    "require",
    "search",
    "redact",
    "tenant_from",
    "tenants",
    "scheme",
    "handlers",
];
const SCHEME_KEYS: [&str; 7] =
    ["algorithm", "header", "prefix", "encoding", "content", "timestamp", "secret_encoding"];

/// Every key of a source, for the test of the default config.
#[cfg(test)]
pub(super) fn all_keys() -> impl Iterator<Item = &'static &'static str> {
    KEYS.iter().chain(&SCHEME_KEYS).chain(super::handlers::all_keys())
}

/// The secrets that were read, to report pairs that share one.
#[derive(Default)]
struct SeenSecrets {
    /// Pairs by the hash of the secret's text.
    texts: HashMap<KeyHash, String>,
    /// Pairs by the hash of the decoded key.
    keys: HashMap<KeyHash, String>,
}

/// The secrets and parameters of one (tenant, source) pair.
struct Pair<'d> {
    tenant: Option<&'d str>,
    section: Section<'d>,
    secrets: Vec<ActiveSecret>,
    params: BTreeMap<String, String>,
    /// Whether all of this could be read; otherwise the errors are reported already.
    complete: bool,
}

impl ConfigReader<'_> {
    /// Builds every declared pair.
    pub(super) fn sources(&mut self, root: &Section<'_>, settings: &Settings) -> ConfiguredSources {
        let mut built = ConfiguredSources::default();
        let mut seen = SeenSecrets::default();
        let Some(sources) = root.get("sources") else {
            // A server with proxies may have no sources.
            if root.get("proxies").is_none() {
                let warning = "no [sources] are configured: every webhook gets a 404";
                self.warnings.push(warning.to_owned());
            }
            return built;
        };
        let Some(sources) = sources.section(&mut self.problems) else { return built };
        for entry in sources.entries() {
            if let Err(invalid) = units::name(entry.name()) {
                entry.report(invalid, &mut self.problems);
                continue;
            }
            let Some(section) = entry.section(&mut self.problems) else { continue };
            self.source(entry.name(), &section, settings, &mut seen, &mut built);
        }
        built
    }

    fn source(
        &mut self,
        name: &str,
        section: &Section<'_>,
        settings: &Settings,
        seen: &mut SeenSecrets,
        built: &mut ConfiguredSources,
    ) {
        section.expect(&KEYS, &mut self.problems);
        let Some(provider) = section.get("provider") else {
            let hint = "add provider = \"stripe\" or another one; `hapax providers` lists all";
            section.report(InvalidSetting::new("has no provider", hint), &mut self.problems);
            return;
        };
        let Some(provider) = provider.text(&mut self.problems) else { return };
        let mut spec = SourceSpec::new(name, provider, Vec::new());
        spec.url_known = settings.public_url.is_some();
        spec.custom = self.scheme(section);
        spec.envelope = self.envelope(section);
        let problems = &mut self.problems;
        let parsed = |key: &str| section.get(key);
        spec.tolerance = parsed("tolerance").and_then(|entry| entry.parse(units::span, problems));
        spec.late = parsed("late").and_then(|entry| entry.parse(late, problems));
        spec.replay_guard =
            parsed("replay_guard").and_then(|entry| entry.parse(replay_guard, problems));
        let rate_limit =
            parsed("rate_limit").and_then(|entry| entry.parse(units::rate, problems)).flatten();
        let unverified_limit = match parsed("unverified_limit") {
            Some(entry) => entry.parse(units::rate, problems).flatten(),
            None => unverified_limit_default(),
        };

        let (pairs, own_params) = self.pairs(name, section, seen);
        let template = SourceSpec { params: own_params, ..spec.clone() };
        let pairs_declared = !pairs.is_empty();
        spec.params =
            pairs.first().map_or_else(|| template.params.clone(), |pair| pair.params.clone());
        let handlers = self.handlers(section, &spec);
        let mode = self.mode(section, &handlers);
        self.check_types_named(&spec, &handlers);

        let mut keep = None;
        for pair in pairs {
            self.check_params(provider, &pair.section);
            let mut spec = spec.clone();
            spec.tenant = pair.tenant.map(Tenant::new).unwrap_or_default();
            spec.name = SourceName::new(name);
            let secrets_until = pair.secrets.iter().map(|secret| secret.until).collect();
            let texts = pair.secrets.iter().map(|active| secret_text_hash(&active.secret));
            let secret_texts = texts.collect();
            spec.secrets = pair.secrets;
            spec.params = pair.params;
            let source = match Source::build(spec) {
                Ok(source) => source,
                Err(error) => {
                    // An unreadable secret is reported already; that it is missing is not a second error.
                    if pair.complete || error.field == "provider" {
                        self.cannot_build(section, &pair.section, error);
                    }
                    continue;
                }
            };
            self.check_secrets_unique(name, pair.tenant, &pair.section, &source, seen);
            let keep_keys = keep_keys(settings, &source);
            self.check_key_retention(section, &source, keep_keys);
            keep = Some(keep_keys);
            built.pairs.push(ConfiguredSource {
                source: Arc::new(source),
                provider: provider.to_owned(),
                path: match pair.tenant {
                    Some(tenant) if tenant != Tenant::default().as_str() => {
                        format!("/webhooks/{tenant}/{name}")
                    }
                    Some(_) | None => format!("/webhooks/{name}"),
                },
                rate_limit,
                unverified_limit,
                secrets_until,
                secret_texts,
                handlers: handlers.clone(),
                mode,
            });
        }
        let keep_keys = match (keep, pairs_declared) {
            (Some(keep), _) => keep,
            // No pair could be built, and the errors are reported.
            (None, true) => Keep::Forever,
            (None, false) => {
                self.check_params(provider, section);
                self.check_template(section, settings, &template)
            }
        };
        built.templates.push(SourceTemplate {
            spec: template,
            rate_limit,
            unverified_limit,
            keep_keys,
            handlers,
            mode,
            search: self.search(section),
            redact: self.redaction(section),
        });
    }

    /// Warns of handlers that run for any topic, where the sender does not sign the topic: a captured request can
    /// then be sent again under topics that do not exist.
    fn check_types_named(&mut self, spec: &SourceSpec, handlers: &[Arc<Handler>]) {
        let Some(preset) = presets::find(&spec.provider) else { return };
        if preset.guard != PresetGuard::SignedAndType || spec.envelope.event_type.is_some() {
            return;
        }
        let is_open = |handler: &&Arc<Handler>| {
            let globs = handler.types.globs();
            globs.is_empty() || globs.iter().any(|glob| glob.contains('*'))
        };
        for handler in handlers.iter().filter(is_open) {
            self.warnings.push(format!(
                "sources.{}.handlers.{}: {} does not sign the topic, so a captured request that is sent again \
                 under an invented topic runs this handler again; name the topics in `types`, without \"*\"",
                spec.name, handler.name, preset.title
            ));
        }
    }

    /// Reads `search`.
    fn search(&mut self, section: &Section<'_>) -> Vec<Pointer> {
        let mut pointers: Vec<Pointer> = Vec::new();
        let Some(entry) = section.get("search") else { return pointers };
        for word in entry.list(&mut self.problems).unwrap_or_default() {
            let Some(text) = word.text(&mut self.problems) else { continue };
            match Pointer::parse(text) {
                Ok(pointer) if !text.is_empty() => pointers.push(pointer),
                Ok(_) | Err(_) => {
                    let invalid = InvalidSetting::new(
                        format!("\"{}\" names no value of a JSON body", text.escape_debug()),
                        "write a JSON pointer such as \"/data/object/customer\"",
                    );
                    word.report(invalid, &mut self.problems);
                }
            }
        }
        pointers.sort_by(|one, other| one.as_str().cmp(other.as_str()));
        pointers.dedup();
        if pointers.len() > SEARCH_FIELDS_MAX {
            let invalid = InvalidSetting::new(
                format!("{} values are more than {SEARCH_FIELDS_MAX}", pointers.len()),
                "name only the values that people look for; /events?q= also searches in whole bodies",
            );
            entry.report(invalid, &mut self.problems);
            pointers.truncate(SEARCH_FIELDS_MAX);
        }
        pointers
    }

    /// Reads `redact`.
    fn redaction(&mut self, section: &Section<'_>) -> Redaction {
        let mut redaction = Redaction::default();
        let Some(entry) = section.get("redact") else { return redaction };
        for word in entry.list(&mut self.problems).unwrap_or_default() {
            let Some(text) = word.text(&mut self.problems) else { continue };
            let hint = "write a JSON pointer such as \"/email\", or \"header:x-user\"";
            match (text.strip_prefix("header:"), Pointer::parse(text)) {
                (Some(name), _) if !name.is_empty() => redaction.headers.push(name.to_owned()),
                (None, Ok(pointer)) => redaction.pointers.push(pointer),
                (_, _) => {
                    let invalid = InvalidSetting::new(
                        format!("\"{}\" names no value", text.escape_debug()),
                        hint,
                    );
                    word.report(invalid, &mut self.problems);
                }
            }
        }
        if redaction.pointers.len() > POINTERS_MAX {
            let invalid = InvalidSetting::new(
                format!("{} pointers are more than {POINTERS_MAX}", redaction.pointers.len()),
                "point at objects that contain several of them",
            );
            entry.report(invalid, &mut self.problems);
        }
        redaction
    }

    /// Checks a source whose tenants are all added at run time, and returns how long its duplicates are
    /// recognised. The check uses a placeholder instead of the tenants' secrets.
    fn check_template(
        &mut self,
        section: &Section<'_>,
        settings: &Settings,
        spec: &SourceSpec,
    ) -> Keep {
        let stand_in = match presets::find(&spec.provider) {
            Some(preset) => signing::dev_secret(preset, "no request is verified with this"),
            None => Some(Secret::new("00112233445566778899aabbccddeeff")),
        };
        let secrets = stand_in.into_iter().map(ActiveSecret::forever).collect();
        match Source::build(SourceSpec { secrets, ..spec.clone() }) {
            Ok(source) => {
                let keep = keep_keys(settings, &source);
                self.check_key_retention(section, &source, keep);
                keep
            }
            // For some senders no placeholder secret can be made.
            Err(error) if matches!(error.field, "secrets" | "params") => Keep::Forever,
            Err(error) => {
                self.cannot_build(section, section, error);
                Keep::Forever
            }
        }
    }

    /// The declared pairs, and the parameters of the source itself. There is a pair for each tenant, and for
    /// the default tenant if the source has secrets or no tenants.
    fn pairs<'d>(
        &mut self,
        name: &str,
        section: &Section<'d>,
        seen: &mut SeenSecrets,
    ) -> (Vec<Pair<'d>>, BTreeMap<String, String>) {
        let mut pairs = Vec::new();
        let own_secrets = section.get("secrets");
        let tenants = section.get("tenants");
        let own = self.pair(None, section, &BTreeMap::new(), name, seen);
        let params = own.params.clone();
        if own_secrets.is_some() || tenants.is_none() {
            pairs.push(own);
        }
        let Some(tenants) = tenants else { return (pairs, params) };
        if let Some(from) = section.get("tenant_from") {
            let invalid = InvalidSetting::new(
                "cannot be combined with [tenants]",
                "remove one: the tenant comes either from the URL or from a field of the signed body",
            );
            from.report(invalid, &mut self.problems);
        }
        let Some(tenants) = tenants.section(&mut self.problems) else { return (pairs, params) };
        for entry in tenants.entries() {
            if let Err(invalid) = units::name(entry.name()) {
                entry.report(invalid, &mut self.problems);
                continue;
            }
            if entry.name() == OWN_TENANT {
                let hint = "give the tenant another name, and its senders another URL";
                entry.report(InvalidSetting::new(own_tenant_fault(), hint), &mut self.problems);
                continue;
            }
            if entry.name() == Tenant::default().as_str() && own_secrets.is_some() {
                let invalid = InvalidSetting::new(
                    format!("the pair (default, {name}) is declared twice"),
                    format!(
                        "secrets directly under [sources.{name}] belong to \"default\": remove one of the two"
                    ),
                );
                entry.report(invalid, &mut self.problems);
                continue;
            }
            let Some(tenant) = entry.section(&mut self.problems) else { continue };
            tenant.expect(&["secrets", "params"], &mut self.problems);
            let label = format!("{}/{name}", entry.name());
            pairs.push(self.pair(Some(entry.name()), &tenant, &params, &label, seen));
        }
        (pairs, params)
    }

    fn pair<'d>(
        &mut self,
        tenant: Option<&'d str>,
        section: &Section<'d>,
        inherited: &BTreeMap<String, String>,
        label: &str,
        seen: &mut SeenSecrets,
    ) -> Pair<'d> {
        let mut complete = true;
        let mut secrets = Vec::new();
        let entries = match section.get("secrets") {
            Some(entry) => {
                let list = entry.list(&mut self.problems);
                complete &= list.is_some();
                list.unwrap_or_default()
            }
            None => Vec::new(),
        };
        for entry in entries {
            match self.active_secret(&entry, label, seen) {
                Some(secret) => secrets.push(secret),
                None => complete = false,
            }
        }
        let mut params = inherited.clone();
        if let Some(entry) = section.get("params") {
            let read = entry.section(&mut self.problems);
            complete &= read.is_some();
            for param in read.iter().flat_map(Section::entries) {
                match self.secret(&param) {
                    Some(value) => {
                        params.insert(param.name().to_owned(), value.expose().to_owned());
                    }
                    None => complete = false,
                }
            }
        }
        Pair { tenant, section: section.clone(), secrets, params, complete }
    }

    /// Reads a secret: text, or `{ value = "…", until = "…" }`.
    fn active_secret(
        &mut self,
        entry: &Entry<'_>,
        label: &str,
        seen: &mut SeenSecrets,
    ) -> Option<ActiveSecret> {
        let (value, until) = match entry.as_section() {
            None => (entry.clone(), None),
            Some(table) => {
                table.expect(&["value", "until"], &mut self.problems);
                let Some(value) = table.get("value") else {
                    let hint = "write { value = \"env:OLD\", until = \"2026-12-01T00:00:00Z\" }";
                    table.report(InvalidSetting::new("has no value", hint), &mut self.problems);
                    return None;
                };
                let until = match table.get("until") {
                    Some(until) => Some(self.instant(&until)?),
                    None => None,
                };
                (value, until)
            }
        };
        let secret = self.secret(&value)?;
        let hash = secret_text_hash(&secret);
        if let Some(other) = seen.texts.get(&hash) {
            value.report(shared_secret(other, label), &mut self.problems);
            return None;
        }
        seen.texts.insert(hash, label.to_owned());
        if until.is_some_and(|until| until <= self.environment.now) {
            self.warnings.push(format!(
                "{label}: the `until` of a secret has passed, so it verifies nothing"
            ));
        }
        let reference = match value.text(&mut self.problems) {
            Some(text) if text.starts_with("env:") || text.starts_with("file:") => text,
            // The text is the secret itself.
            Some(_) | None => "a literal in the config",
        };
        Some(ActiveSecret { until, ..ActiveSecret::forever(secret).known_as(reference) })
    }

    fn instant(&mut self, entry: &Entry<'_>) -> Option<Timestamp> {
        let text = entry.instant_text(&mut self.problems)?;
        match text.parse() {
            Ok(instant) => Some(instant),
            Err(_) => {
                let invalid = InvalidSetting::new(
                    format!("\"{text}\" is not a time"),
                    "write RFC 3339 with an offset: \"2026-12-01T00:00:00Z\"",
                );
                entry.report(invalid, &mut self.problems);
                None
            }
        }
    }

    fn scheme(&mut self, section: &Section<'_>) -> Option<CustomScheme> {
        let scheme = section.get("scheme")?.section(&mut self.problems)?;
        scheme.expect(&SCHEME_KEYS, &mut self.problems);
        let mut text = |key: &str| {
            let text = scheme.get(key).and_then(|entry| entry.text(&mut self.problems));
            text.map(str::to_owned)
        };
        Some(CustomScheme {
            algorithm: text("algorithm"),
            header: text("header"),
            prefix: text("prefix"),
            encoding: text("encoding"),
            content: text("content"),
            timestamp: text("timestamp"),
            secret_encoding: text("secret_encoding"),
        })
    }

    fn envelope(&mut self, section: &Section<'_>) -> EnvelopeSpec {
        let event_id = section.get("event_id").and_then(|entry| self.event_id(&entry));
        let problems = &mut self.problems;
        let require = section.get("require").and_then(|entry| entry.texts(problems));
        let mut text =
            |key: &str| section.get(key).and_then(|entry| entry.text(problems)).map(str::to_owned);
        EnvelopeSpec {
            event_id,
            event_type: text("event_type"),
            occurred_at: text("occurred_at"),
            items: text("items"),
            require: require.unwrap_or_default().into_iter().map(str::to_owned).collect(),
            tenant_from: text("tenant_from"),
        }
    }

    fn event_id(&mut self, entry: &Entry<'_>) -> Option<IdSpec> {
        let problems = &mut self.problems;
        let Some(table) = entry.as_section() else {
            return entry.text(problems).map(|selector| IdSpec::Selector(selector.to_owned()));
        };
        table.expect(&["hash", "within"], problems);
        let Some(hash) = table.get("hash") else {
            let hint = "write { hash = [\"/type\", \"/data/id\"], within = \"10m\" }";
            table.report(InvalidSetting::new("has no hash", hint), problems);
            return None;
        };
        let fields = hash.texts(problems)?;
        if fields.is_empty() {
            let hint = "list the fields that together identify an event";
            hash.report(InvalidSetting::new("is empty", hint), problems);
            return None;
        }
        let within = table.get("within").and_then(|entry| entry.parse(units::span, problems));
        Some(IdSpec::Hash { fields: fields.into_iter().map(str::to_owned).collect(), within })
    }

    /// Reports unknown parameters: a mistyped optional one would otherwise be ignored.
    fn check_params(&mut self, provider: &str, section: &Section<'_>) {
        let preset = presets::find(provider);
        let known: Vec<_> = preset.into_iter().flat_map(Preset::params).map(|it| it.name).collect();
        if let Some(params) = section.get("params").and_then(|entry| entry.as_section()) {
            params.expect(&known, &mut self.problems);
        }
    }

    /// Reports secrets that two pairs share. The decoded keys are compared, because one secret can be written
    /// in several ways.
    fn check_secrets_unique(
        &mut self,
        name: &str,
        tenant: Option<&str>,
        section: &Section<'_>,
        source: &Source,
        seen: &mut SeenSecrets,
    ) {
        let label = match tenant {
            Some(tenant) => format!("{tenant}/{name}"),
            None => name.to_owned(),
        };
        let entries = section.get("secrets").and_then(|entry| entry.list(&mut self.problems));
        let entries = entries.unwrap_or_default();
        let webhook_id = section.deepest("params.webhook_id");
        for (place, hash) in source.scheme().key_hashes().iter().enumerate() {
            match (seen.keys.get(hash), entries.get(place)) {
                (Some(other), Some(entry)) => {
                    entry.report(shared_secret(other, &label), &mut self.problems);
                }
                (Some(other), None) => {
                    let invalid = shared_webhook_id(other);
                    match &webhook_id {
                        Some(entry) => entry.report(invalid, &mut self.problems),
                        // The tenant takes it from its source.
                        None => section.report(invalid, &mut self.problems),
                    }
                }
                (None, _) => {
                    seen.keys.insert(*hash, label.clone());
                }
            }
        }
    }

    /// Reports an error at the key that caused it, in the tenant's section or in the source's.
    fn cannot_build(&mut self, source: &Section<'_>, pair: &Section<'_>, error: SourceError) {
        let SourceError { field, problem, hint } = error;
        let invalid = InvalidSetting::new(problem, hint);
        let entry = pair.deepest(field).or_else(|| source.deepest(field));
        match (entry, field) {
            (Some(entry), _) => entry.report(invalid, &mut self.problems),
            // This provider needs public_url, so the error is reported at the provider.
            (None, "public_url") => match source.get("provider") {
                Some(provider) => provider.report(invalid, &mut self.problems),
                None => source.report(invalid, &mut self.problems),
            },
            (None, _) => pair.report(invalid, &mut self.problems),
        }
    }

    /// Reports keys that expire before their signature does: a replay would then be accepted as new.
    fn check_key_retention(&mut self, section: &Section<'_>, source: &Source, keep: Keep) {
        if let Keep::For(keep) = keep
            && source.signs_time()
            && keep < source.tolerance().saturating_mul(2)
        {
            let invalid = InvalidSetting::new(
                "retention.keys is shorter than the replay window of this source",
                "keep keys at least twice as long as `tolerance`; 90d is the default",
            );
            match section.get("tolerance") {
                Some(entry) => entry.report(invalid, &mut self.problems),
                None => section.report(invalid, &mut self.problems),
            }
        }
    }
}

fn shared_secret(other: &str, label: &str) -> InvalidSetting {
    if other == label {
        return InvalidSetting::new("the same secret twice", "remove one of them");
    }
    InvalidSetting::new(
        format!("shares a secret with {other}"),
        "give each (tenant, source) pair its own secret, so that a signature identifies one pair",
    )
}

fn shared_webhook_id(other: &str) -> InvalidSetting {
    InvalidSetting::new(
        format!("shares its webhook_id with {other}"),
        "PayPal signs nothing else that identifies the pair: create a webhook for each (tenant, source) pair \
         and write its own id",
    )
}

fn late(text: &str) -> Result<LatePolicy, InvalidSetting> {
    match text {
        "reject" => Ok(LatePolicy::Reject),
        "review" => Ok(LatePolicy::Review),
        other => Err(InvalidSetting::new(
            format!("\"{other}\" is not a way to handle late events"),
            "write \"reject\" or \"review\"",
        )),
    }
}

fn replay_guard(text: &str) -> Result<ReplayGuard, InvalidSetting> {
    match text {
        "signed" => Ok(ReplayGuard::Signed),
        "off" => Ok(ReplayGuard::Off),
        other => Err(InvalidSetting::new(
            format!("\"{other}\" is not a replay guard"),
            "write \"signed\" or \"off\"",
        )),
    }
}
