//! Checks the settings of an endpoint against their bounds, and seals its secrets and custom headers. The
//! admin API and apps that embed Hapax share this code.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use zeroize::Zeroizing;

use crate::endpoint::{EndpointId, EndpointRecord, EndpointSealed, EndpointSettings, SecretAge};
use crate::endpoint_secret::{EndpointSecrets, RotateError, SigningSecret};
use crate::key::Tenant;
use crate::limits::MESSAGE_NAME_BYTES_MAX;
use crate::vault::{NONCE_BYTES, SealContext, Sealed, Vault};

/// The most attempts of a schedule: more would keep a broken endpoint busy for months.
const RETRIES_MAX: usize = 100;

/// The longest wait of a schedule.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(30 * 86_400);

/// The longest deadline of an attempt: a slot of the sender is used until then.
const TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// The shortest deadline of an attempt.
const TIMEOUT_MIN: Duration = Duration::from_millis(100);

/// The most attempts of one endpoint at once.
const IN_FLIGHT_MAX: u32 = 1_000;

/// The longest description, and the longest metadata in all.
const TEXT_BYTES_MAX: usize = 4_096;

/// The most globs over types: each is compared with every message of the tenant.
const GLOBS_MAX: usize = 100;

/// Why an endpoint cannot have these settings, if so. The URL and custom headers are checked elsewhere.
pub fn settings_fault(settings: &EndpointSettings) -> Option<String> {
    let fault = |text: &str| Some(text.to_owned());
    if !(1..=RETRIES_MAX).contains(&settings.retry.len()) {
        return fault("retry must have 1 to 100 waits: one for each attempt");
    }
    if settings.retry.iter().any(|wait| *wait > RETRY_WAIT_MAX) {
        return fault("a wait of retry must be at most 30d");
    }
    if !(TIMEOUT_MIN..=TIMEOUT_MAX).contains(&settings.timeout) {
        return fault("timeout must be from 100ms to 60s");
    }
    if !(1..=IN_FLIGHT_MAX).contains(&settings.max_in_flight) {
        return fault("max_in_flight must be a number from 1 to 1000");
    }
    let names = [("uid", &settings.uid), ("api_version", &settings.api_version)];
    for (name, value) in names {
        if value.as_deref().is_some_and(|value| !is_name(value)) {
            return Some(format!("{name} must have 1 to 255 bytes and no control characters"));
        }
    }
    let metadata: usize =
        settings.metadata.iter().map(|(key, value)| key.len() + value.len()).sum();
    let description = settings.description.as_ref().map_or(0, String::len);
    if metadata > TEXT_BYTES_MAX || description > TEXT_BYTES_MAX {
        return fault("description and metadata must have at most 4096 bytes each");
    }
    let metadata = settings.metadata.iter().flat_map(|(key, value)| [key, value]);
    if metadata.chain(&settings.description).any(|text| text.contains('\0')) {
        return fault("description and metadata must have no NUL");
    }
    let globs = settings.types.globs();
    if globs.len() > GLOBS_MAX || globs.iter().any(|glob| glob.len() > MESSAGE_NAME_BYTES_MAX) {
        return fault("types must have at most 100 globs of at most 255 bytes");
    }
    None
}

/// Why no endpoint can belong to a tenant of this name, if so.
/// [`OWN_TENANT`](crate::message::OWN_TENANT) is accepted here, although its endpoints get the
/// messages of Hapax about itself. A caller must refuse that tenant unless only operators can add
/// endpoints through it.
pub fn tenant_fault(name: &str) -> Option<&'static str> {
    (!is_name(name)).then_some("tenant must have 1 to 255 bytes and no control characters")
}

fn is_name(text: &str) -> bool {
    (1..=MESSAGE_NAME_BYTES_MAX).contains(&text.len()) && !text.chars().any(char::is_control)
}

/// The secrets of an endpoint, sealed for it alone.
pub fn seal_secrets(
    vault: &Vault,
    tenant: &Tenant,
    id: EndpointId,
    secrets: &EndpointSecrets,
    nonce: [u8; NONCE_BYTES],
) -> Sealed {
    let id = id.to_string();
    vault.seal(&SealContext::endpoint_secrets(tenant, &id), &secrets.to_bytes(), nonce)
}

/// Why the secret of an endpoint cannot be replaced. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RotateFault {
    /// The current secrets cannot be read.
    #[error("the secrets of the endpoint cannot be read: {0}")]
    Unreadable(String),
    /// The rotation is not possible now.
    #[error(transparent)]
    Refused(#[from] RotateError),
}

/// The settings and sealed values of an endpoint after `new` replaced its newest secret. The replaced one signs
/// for `overlap` longer.
pub fn rotated(
    vault: &Vault,
    record: EndpointRecord,
    new: SigningSecret,
    overlap: Duration,
    now: Timestamp,
    nonce: [u8; NONCE_BYTES],
) -> Result<(EndpointSettings, EndpointSealed), RotateFault> {
    let id = record.id.to_string();
    let context = SealContext::endpoint_secrets(&record.tenant, &id);
    let opened = vault
        .open(&context, &record.sealed.secrets)
        .map_err(|error| RotateFault::Unreadable(error.to_string()))?;
    let secrets = EndpointSecrets::from_bytes(&opened)
        .map_err(|error| RotateFault::Unreadable(error.to_string()))?;
    let (signing, public_key) = (new.signing(), new.public_key());
    let secrets = secrets.rotate(new, overlap, now)?;
    let secrets = seal_secrets(vault, &record.tenant, record.id, &secrets, nonce);
    let secret_ages = SecretAge::rotated(&record.settings.secret_ages, overlap, now);
    let settings = EndpointSettings { signing, public_key, secret_ages, ..record.settings };
    Ok((settings, EndpointSealed { secrets, ..record.sealed }))
}

/// The custom headers of an endpoint, sealed for it alone; `None` if there are none.
pub fn seal_headers(
    vault: &Vault,
    tenant: &Tenant,
    id: EndpointId,
    headers: &BTreeMap<String, String>,
    nonce: [u8; NONCE_BYTES],
) -> Option<Sealed> {
    if headers.is_empty() {
        return None;
    }
    let pairs: Vec<(&String, &String)> = headers.iter().collect();
    let text = Zeroizing::new(serde_json::to_vec(&pairs).expect("pairs of text are JSON"));
    let id = id.to_string();
    Some(vault.seal(&SealContext::endpoint_headers(tenant, &id), &text, nonce))
}
