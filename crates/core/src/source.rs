//! A [`Source`]: a configured sender. A source is checked once, when it is built, so that no request has to
//! check again whether a secret is empty or a parameter missing.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::envelope::{Envelope, EnvelopeSpec, Origin, SelectorError};
use crate::handshake::{Challenge, HandshakeKeys};
use crate::json::Pointer;
use crate::key::{SourceName, Tenant};
use crate::presets::{self, Ack, Preset, PresetGuard};
use crate::scheme::coverage::BodyCovered;
use crate::scheme::{CustomScheme, Scheme, SchemeError};
use crate::secret::ActiveSecret;
use crate::store::Verifier;

/// The config of a source, for one tenant, still unchecked.
#[derive(Debug, Clone)]
pub struct SourceSpec {
    /// The tenant whose events arrive here.
    pub tenant: Tenant,
    /// The source's name.
    pub name: SourceName,
    /// A preset's name, or `custom`.
    pub provider: String,
    /// The secrets. A request is accepted if any of them signed it.
    pub secrets: Vec<ActiveSecret>,
    /// Parameters that some schemes need in addition to a secret: `webhook_id`, `cert_pem`, `jwks`, `key`
    /// and so on.
    pub params: BTreeMap<String, String>,
    /// `[sources.NAME.scheme]`, with `provider = "custom"`.
    pub custom: Option<CustomScheme>,
    /// Whether the full public URL of this source is known. Schemes that sign the URL need it.
    pub url_known: bool,
    /// The most by which a signed timestamp may differ from now, in both directions. `None` takes the
    /// preset's window, which is wider than the default for senders that retry with the old signature.
    pub tolerance: Option<Duration>,
    /// The treatment of late but authentic arrivals. `None` takes the preset's default.
    pub late: Option<LatePolicy>,
    /// Whether signed content is stored as a guard. `None` takes the scheme's default.
    pub replay_guard: Option<ReplayGuard>,
    /// Selectors that replace the preset's own.
    pub envelope: EnvelopeSpec,
}

impl SourceSpec {
    /// A spec for `provider` with these secrets and every default.
    pub fn new(name: &str, provider: &str, secrets: Vec<ActiveSecret>) -> Self {
        Self {
            tenant: Tenant::default(),
            name: SourceName::new(name),
            provider: provider.to_owned(),
            secrets,
            params: BTreeMap::new(),
            custom: None,
            url_known: true,
            tolerance: None,
            late: None,
            replay_guard: None,
            envelope: EnvelopeSpec::default(),
        }
    }
}

/// The default window of a signed timestamp: five minutes in both directions.
pub const TOLERANCE_DEFAULT: Duration = Duration::from_secs(300);

/// The treatment of an authentic arrival that was signed before the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatePolicy {
    /// Refused with 401.
    Reject,
    /// Stored for an operator's review.
    Review,
}

/// Whether signed content is stored as a guard, so that it has one effect under any id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplayGuard {
    /// A known signed content under another id is a suspected replay.
    Signed,
    /// Signed content under another id is a new event.
    Off,
}

/// A configured sender, ready to verify.
#[derive(Debug)]
pub struct Source {
    pub(crate) tenant: Tenant,
    pub(crate) name: SourceName,
    pub(crate) preset: Option<&'static Preset>,
    pub(crate) scheme: Scheme,
    pub(crate) envelope: Envelope,
    pub(crate) tolerance: Duration,
    pub(crate) late: LatePolicy,
    pub(crate) replay_guard: ReplayGuard,
    /// Whether the type is part of the guard.
    pub(crate) guards_type: bool,
    /// The values of an event that change with each attempt. Empty if the source is guarded.
    pub(crate) counters: Vec<Pointer>,
    pub(crate) handshake: HandshakeKeys,
    /// One for each secret, in their order.
    pub(crate) verifiers: Vec<Verifier>,
    /// [`Verifier::number`] of each verifier.
    pub(crate) verifier_numbers: Vec<usize>,
}

/// Why a source cannot be built. `field` is the config key at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct SourceError {
    /// The config key below `[sources.NAME]` that is wrong, such as `provider` or `secrets`.
    pub field: &'static str,
    /// The problem.
    pub problem: String,
    /// How to fix the problem.
    pub hint: String,
}

impl Source {
    /// Checks a spec and compiles it. A source that could not verify requests is refused here; no check
    /// is skipped later.
    pub fn build(spec: SourceSpec) -> Result<Self, SourceError> {
        let preset = match spec.provider.as_str() {
            "custom" => None,
            name => Some(presets::find(name).ok_or_else(|| unknown_provider(name))?),
        };
        let scheme = match (preset, &spec.custom) {
            (Some(preset), None) => Scheme::of_preset(preset, &spec),
            (None, Some(custom)) => Scheme::of_custom(custom, &spec),
            (Some(_), Some(_)) => Err(SchemeError::new(
                "scheme",
                "[sources.NAME.scheme] needs provider = \"custom\"",
                "remove [sources.NAME.scheme], or set provider = \"custom\"",
            )),
            (None, None) => Err(SchemeError::new(
                "scheme",
                "provider = \"custom\" needs [sources.NAME.scheme]",
                "name there the header that carries the signature and the content that is signed",
            )),
        }
        .map_err(|SchemeError { field, problem, hint }| SourceError {
            field,
            problem,
            hint,
        })?;
        let guards_type = spec.envelope.event_type.is_none()
            && preset.is_some_and(|preset| preset.guard == PresetGuard::SignedAndType);
        let envelope =
            Envelope::build(preset.map(|preset| &preset.envelope), &spec.envelope).map_err(
                |SelectorError { field, problem, hint }| SourceError { field, problem, hint },
            )?;
        let envelope = if guards_type { envelope.with_type_required() } else { envelope };
        check_origins(&scheme, &envelope, &spec)?;
        let late = spec.late.unwrap_or(match preset {
            Some(preset) if !preset.signs_retries_afresh && scheme.signs_time() => {
                LatePolicy::Review
            }
            Some(_) => LatePolicy::Reject,
            None => LatePolicy::Review,
        });
        let replay_guard = match spec.replay_guard {
            Some(guard) => guard,
            // According to the config, equal content is another event after the span. A guard would treat
            // that event as a copy for as long as the keys are stored.
            None if spec.envelope.event_id.is_some()
                && !scheme.signs_time()
                && scheme.coverage().iter().all(|coverage| envelope.is_signed_span(coverage)) =>
            {
                ReplayGuard::Off
            }
            None => guard_by_default(preset, &scheme, &envelope),
        };
        let counters = match replay_guard {
            ReplayGuard::Off => counters(preset, &spec.envelope),
            ReplayGuard::Signed => Vec::new(),
        };
        let verifiers = verifiers(&spec);
        Ok(Self {
            verifier_numbers: verifiers.iter().map(Verifier::number).collect(),
            verifiers,
            tenant: spec.tenant,
            name: spec.name,
            preset,
            scheme,
            envelope,
            tolerance: spec
                .tolerance
                .or(preset.and_then(|preset| preset.window))
                .unwrap_or(TOLERANCE_DEFAULT),
            late,
            replay_guard,
            guards_type,
            counters,
            handshake: HandshakeKeys::new(&spec.secrets, &spec.params),
        })
    }

    /// The names of the verifiers: one for each secret, in their order, or one for a scheme that
    /// needs no secret.
    pub fn verifiers(&self) -> &[Verifier] {
        &self.verifiers
    }

    /// The number of the verifier with the secret at this index: see [`Verifier::number`].
    pub fn verifier_number(&self, secret: usize) -> usize {
        let numbers = &self.verifier_numbers;
        numbers.get(secret).or(numbers.first()).copied().unwrap_or_default()
    }

    /// The tenant whose events arrive here, unless the signed body names another.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// The source's name.
    pub fn name(&self) -> &SourceName {
        &self.name
    }

    /// The most by which a signed timestamp may differ from now, in both directions.
    pub fn tolerance(&self) -> Duration {
        self.tolerance
    }

    /// The sender's own id of an event: the first part of an id that is joined from several.
    pub fn first_part<'a>(&self, event_id: &'a str) -> &'a str {
        let joined = matches!(
            self.preset.map(|preset| preset.envelope.id),
            Some(presets::PresetId::Joined(_))
        );
        match event_id.split_once(':') {
            Some((first, _)) if joined => first,
            Some(_) | None => event_id,
        }
    }

    /// The treatment of late arrivals.
    pub fn late(&self) -> LatePolicy {
        self.late
    }

    /// Whether signed content is stored as a guard.
    pub fn replay_guard(&self) -> ReplayGuard {
        self.replay_guard
    }

    /// The compiled scheme.
    pub fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// The answer that this sender requires.
    pub fn ack(&self) -> Ack {
        self.preset.map(|preset| preset.ack).unwrap_or_default()
    }

    /// The handshake that this sender starts before or between its events. A custom source answers the
    /// CloudEvents handshake.
    pub fn challenge(&self) -> Option<Challenge> {
        match self.preset {
            Some(preset) => preset.challenge,
            None => Some(Challenge::CloudEvents),
        }
    }

    /// Whether a body of this content type can be one of this sender's events.
    pub fn content_type_fits(&self, content_type: Option<&str>) -> bool {
        self.envelope.content_type_fits(content_type)
    }

    /// Whether the scheme signs a timestamp. Without one, keys never expire by default.
    pub fn signs_time(&self) -> bool {
        self.scheme.signs_time()
    }
}

/// The counters of a preset, unless the config names another id or other events in the body.
fn counters(preset: Option<&'static Preset>, envelope: &EnvelopeSpec) -> Vec<Pointer> {
    match preset {
        Some(preset) if envelope.event_id.is_none() && envelope.items.is_none() => {
            let pointer = |text: &&str| Pointer::parse(text).expect("written in a preset");
            preset.counters.iter().map(pointer).collect()
        }
        Some(_) | None => Vec::new(),
    }
}

/// The default of `replay_guard`.
fn guard_by_default(
    preset: Option<&'static Preset>,
    scheme: &Scheme,
    envelope: &Envelope,
) -> ReplayGuard {
    let is_off = preset.is_some_and(|preset| preset.guard == PresetGuard::Off);
    let is_needed = scheme.coverage().iter().any(|coverage| envelope.needs_guard(coverage));
    if is_needed && !is_off { ReplayGuard::Signed } else { ReplayGuard::Off }
}

/// Checks that the selectors of tenant and type that the config sets point at signed values. (The
/// selectors of a preset were chosen for their sender.)
fn check_origins(
    scheme: &Scheme,
    envelope: &Envelope,
    spec: &SourceSpec,
) -> Result<(), SourceError> {
    let is_certain =
        |origin: Origin<'_>| scheme.coverage().iter().all(|coverage| coverage.is_certain(origin));
    if let Some(origin) = envelope.tenant_origin()
        && !is_certain(origin)
    {
        return Err(SourceError {
            field: "tenant_from",
            problem:
                "the tenant would be read from a value that the sender does not sign, or whose \
                      bytes may come from an adjacent signed value"
                    .to_owned(),
            hint: "name a signed field of a JSON body, or give each tenant a secret under \
                   [sources.NAME.tenants.TENANT]"
                .to_owned(),
        });
    }
    // If no part of the body is signed, all of its fields are equally unsigned.
    let signs_body =
        scheme.coverage().iter().any(|coverage| coverage.body() != BodyCovered::Nothing);
    let is_unsigned = |origin: Origin<'_>| match origin {
        Origin::Header(_) | Origin::Query => scheme.signs_something() && !is_certain(origin),
        Origin::Pointer(_) | Origin::Field | Origin::Body | Origin::Signed => {
            signs_body && !is_certain(origin)
        }
    };
    if spec.envelope.event_type.is_some() && envelope.type_origins().any(is_unsigned) {
        return Err(SourceError {
            field: "event_type",
            problem: "the type would be read from a value that the sender does not sign".to_owned(),
            hint: "name a signed field such as \"/type\"; with {header:NAME} in the scheme's \
                   content a header is signed too"
                .to_owned(),
        });
    }
    if spec.replay_guard == Some(ReplayGuard::Signed) && !scheme.signs_something() {
        return Err(SourceError {
            field: "replay_guard",
            problem: "this sender signs nothing, so a replay cannot be recognised".to_owned(),
            hint: "remove replay_guard".to_owned(),
        });
    }
    let own_items = matches!(scheme.coverage(), [one] if matches!(
        one.body(), BodyCovered::Pointers(_) | BodyCovered::Nothing | BodyCovered::Fields
    ));
    if spec.envelope.items.is_some() && own_items && scheme.signs_something() {
        return Err(SourceError {
            field: "items",
            problem: "this sender signs too little of its body for another list of events"
                .to_owned(),
            hint: "remove items; `hapax providers NAME` shows what is signed".to_owned(),
        });
    }
    Ok(())
}

fn unknown_provider(name: &str) -> SourceError {
    let hint = match presets::nearest(name) {
        Some(near) => format!("did you mean \"{near}\"? `hapax providers` lists them all"),
        None => "`hapax providers` lists them all; for any other sender use \"custom\"".to_owned(),
    };
    SourceError { field: "provider", problem: format!("unknown provider \"{name}\""), hint }
}

/// The names of the verifiers of a source.
fn verifiers(spec: &SourceSpec) -> Vec<Verifier> {
    let named =
        |secret: &str| Verifier { scheme: spec.provider.clone(), secret: secret.to_owned() };
    let reference = |secret: &ActiveSecret| named(secret.reference.as_deref().unwrap_or("unnamed"));
    match spec.secrets.as_slice() {
        [] => vec![named("the sender's public key")],
        secrets => secrets.iter().map(reference).collect(),
    }
}
