//! Sending from an app that embeds Hapax: its endpoints, and the sender that delivers to them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::endpoint::{
    EndpointAct, EndpointChanged, EndpointId, EndpointOrder, EndpointSealed, EndpointSettings,
    NewEndpoint, OnDead, SecretAge,
};
use hapax_core::endpoint_check::{
    rotated, seal_headers, seal_secrets, settings_fault, tenant_fault,
};
use hapax_core::endpoint_secret::{EndpointSecrets, Signing, SigningSecret};
use hapax_core::handler::TypeFilter;
use hapax_core::message::{NewMessage, OWN_TENANT, Payload, own_tenant_fault};
use hapax_core::store::{Action, Published, StoreError};
use hapax_core::vault::{NONCE_BYTES, RepeatedKey, Vault, VaultKey};
use hapax_core::{Tenant, Timestamp};
use hapax_engine::{
    CustomHeaders, ENDPOINT_PORTS, EgressProxy, EndpointCaller, GuardRules, Now, Outbound,
    OutboundTlsError, Sender, SenderLimits, SenderSetup,
};
use ipnet::IpNet;
use uuid::Uuid;

use super::database::Database;
use super::running::Hapax;

/// Attempts under way at once, over all endpoints of this process.
const IN_FLIGHT_DEFAULT: usize = 2_048;

/// The sum of the bodies of these attempts, in bytes.
const IN_FLIGHT_BYTES_DEFAULT: usize = 64 << 20;

/// The most attempts at a rotation, each of which fails if the endpoint changes between reading and writing it.
const CHANGE_TRIES: usize = 5;

/// The sending settings of an app: the key that seals the secrets of endpoints, and the addresses
/// that endpoints may have.
#[derive(Debug)]
#[must_use = "give it to `Builder::sending`"]
pub struct Sending {
    key: VaultKey,
    old: Vec<VaultKey>,
    allow: Vec<IpNet>,
    ports: Vec<u16>,
    proxy: Option<EgressProxy>,
    limits: SenderLimits,
}

/// An endpoint to add. Every setting has the default of `POST /api/v1/endpoints`.
#[must_use = "give it to `Hapax::add_endpoint`"]
pub struct Endpoint {
    tenant: Tenant,
    settings: EndpointSettings,
    types: Vec<String>,
    headers: BTreeMap<String, String>,
    secret: Option<String>,
}

/// An endpoint that was added, or whose secret was replaced.
pub struct AddedEndpoint {
    /// Its id.
    pub id: EndpointId,
    /// The secret that its deliveries are signed with. The secret cannot be read again. `None` with
    /// a key pair.
    pub secret: Option<String>,
    /// The key that receivers verify with, if deliveries are signed with a key pair.
    pub public_key: Option<String>,
}

/// Why an endpoint cannot be added or removed, or why a message cannot be published.
#[derive(Debug, thiserror::Error)]
pub enum SendingError {
    /// The builder has no [`Builder::sending`](super::Builder::sending).
    #[error("this Hapax has no key for the secrets of endpoints: use Builder::sending")]
    NotConfigured,
    /// A setting, the URL, a header, the secret or a message is not acceptable.
    #[error("{0}")]
    Invalid(String),
    /// Another endpoint of the tenant has the uid, or the tenant has too many endpoints.
    #[error("{0}")]
    Conflict(String),
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Why a sender cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SendingSetupError {
    /// Two keys are equal.
    #[error(transparent)]
    Keys(#[from] RepeatedKey),
    /// The client has no certificate authorities.
    #[error(transparent)]
    Tls(#[from] OutboundTlsError),
}

/// The sending side of a running Hapax.
#[derive(Debug)]
pub(super) struct ActiveSending<S> {
    vault: Arc<Vault>,
    endpoint_caller: Arc<EndpointCaller>,
    pub(super) sender: Arc<Sender<S>>,
}

impl Sending {
    /// Seals with this key. All nodes of one database need the same key, and without it no stored secret can be
    /// read: keep a copy.
    pub fn new(key: VaultKey) -> Self {
        Self {
            key,
            old: Vec::new(),
            allow: Vec::new(),
            ports: ENDPOINT_PORTS.to_vec(),
            proxy: None,
            limits: SenderLimits {
                in_flight_max: IN_FLIGHT_DEFAULT,
                in_flight_bytes_max: IN_FLIGHT_BYTES_DEFAULT,
            },
        }
    }

    /// Also opens values that this key sealed, before the key of [`Sending::new`] replaced it.
    pub fn old_key(mut self, key: VaultKey) -> Self {
        self.old.push(key);
        self
    }

    /// Endpoints may be in this net although it is not public, on any port.
    pub fn allow(mut self, net: IpNet) -> Self {
        self.allow.push(net);
        self
    }

    /// The ports of endpoints at public addresses; by default 443 and 80.
    pub fn ports(mut self, ports: impl IntoIterator<Item = u16>) -> Self {
        self.ports = ports.into_iter().collect();
        self
    }

    /// Every delivery goes through this proxy.
    pub fn proxy(mut self, proxy: EgressProxy) -> Self {
        self.proxy = Some(proxy);
        self
    }

    /// Sets the limits of attempts in flight; by default 2,048 attempts and 64 MiB.
    pub fn limits(mut self, limits: SenderLimits) -> Self {
        self.limits = limits;
        self
    }

    pub(super) fn open<S: Database>(
        self,
        store: &Arc<S>,
        now: &Now,
    ) -> Result<ActiveSending<S>, SendingSetupError> {
        let vault = Arc::new(Vault::new(self.key, self.old)?);
        let rules = GuardRules::new(self.allow, self.ports, self.proxy);
        let client = Outbound::guarded(rules)?;
        let endpoint_caller = Arc::new(EndpointCaller::new(client, Arc::clone(&vault)));
        let setup =
            SenderSetup { endpoint_caller: Arc::clone(&endpoint_caller), limits: self.limits };
        let sender = Arc::new(Sender::new(Arc::clone(store), Arc::clone(now), Some(setup)));
        Ok(ActiveSending { vault, endpoint_caller, sender })
    }
}

impl Sending {
    /// The proxy of every request to an address that the app did not configure.
    pub(super) fn proxy_of_all(&self) -> Option<EgressProxy> {
        self.proxy.clone()
    }
}

impl Endpoint {
    /// An endpoint at this URL that gets every message of the tenant `default`.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            tenant: Tenant::default(),
            settings: EndpointSettings::at(url),
            types: Vec::new(),
            headers: BTreeMap::new(),
            secret: None,
        }
    }

    /// Only messages of these types; `*` matches any characters.
    pub fn types<T: Into<String>>(mut self, types: impl IntoIterator<Item = T>) -> Self {
        self.types = types.into_iter().map(Into::into).collect();
        self
    }

    /// The owner.
    pub fn tenant(mut self, tenant: &str) -> Self {
        self.tenant = Tenant::new(tenant);
        self
    }

    /// How deliveries are signed; by default as in Standard Webhooks with a shared secret.
    pub fn signing(mut self, signing: Signing) -> Self {
        self.settings.signing = signing;
        self
    }

    /// A secret of your own: `whsec_` and base64 of 24 to 64 bytes, or a private key (`whsk_`) for
    /// [`Signing::Ed25519`]. Without this call Hapax makes a secret.
    pub fn secret(mut self, secret: impl Into<String>) -> Self {
        self.secret = Some(secret.into());
        self
    }

    /// The wait before each attempt.
    pub fn retry(mut self, waits: impl IntoIterator<Item = Duration>) -> Self {
        self.settings.retry = waits.into_iter().collect();
        self
    }

    /// The deadline of one attempt; by default 10 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout;
        self
    }

    /// Sends only `data.id` and `data.object`.
    pub fn thin(mut self) -> Self {
        self.settings.payload = Payload::Thin;
        self
    }

    /// The messages of one key come one at a time, in the order of publishing.
    pub fn in_order(mut self, on_dead: OnDead) -> Self {
        self.settings.order = EndpointOrder::Key;
        self.settings.on_dead = on_dead;
        self
    }

    /// How many attempts may be under way at once, over all nodes; by default 16.
    pub fn max_in_flight(mut self, attempts: u32) -> Self {
        self.settings.max_in_flight = attempts;
        self
    }

    /// A header of every delivery. Its value is sealed.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// A name of your own, unique within the tenant.
    pub fn uid(mut self, uid: impl Into<String>) -> Self {
        self.settings.uid = Some(uid.into());
        self
    }
}

// Not derived: both hold secrets.
impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("url", &self.settings.url).finish_non_exhaustive()
    }
}

impl fmt::Debug for AddedEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddedEndpoint").field("id", &self.id).finish_non_exhaustive()
    }
}

impl<S: Database> Hapax<S> {
    /// Adds an endpoint. The endpoint gets messages that are published from now on.
    pub async fn add_endpoint(&self, endpoint: Endpoint) -> Result<AddedEndpoint, SendingError> {
        let sending = self.sending.as_ref().ok_or(SendingError::NotConfigured)?;
        let invalid = |why: &dyn fmt::Display| SendingError::Invalid(why.to_string());
        let Endpoint { tenant, mut settings, types, headers, secret } = endpoint;
        if let Some(fault) = tenant_fault(tenant.as_str()) {
            return Err(invalid(&fault));
        }
        // The tenant may be a name that a customer of the app chose.
        if tenant.as_str() == OWN_TENANT {
            return Err(invalid(&own_tenant_fault()));
        }
        settings.types = TypeFilter::new(types).map_err(|error| invalid(&error.problem))?;
        if let Some(fault) = settings_fault(&settings) {
            return Err(invalid(&fault));
        }
        let checked = sending.endpoint_caller.check(&settings.url, settings.address_by).await;
        let url = checked.map_err(|error| invalid(&error))?;
        settings.url = url.as_str().to_owned();
        let pairs = headers.iter().map(|(name, value)| (&**name, &**value));
        CustomHeaders::parse(pairs).map_err(|error| invalid(&error))?;
        settings.header_names = headers.keys().map(|name| name.to_ascii_lowercase()).collect();
        let secret =
            SigningSecret::given_or_generated(settings.signing, secret.as_deref(), &random())
                .map_err(|error| invalid(&error))?;
        let shown = secret.expose().map(|shown| shown.to_string());
        let public_key = secret.public_key();
        settings.public_key.clone_from(&public_key);
        settings.secret_ages = vec![SecretAge::new(Timestamp::now())];
        let id = EndpointId(Uuid::now_v7());
        let secrets = EndpointSecrets::new(secret);
        let sealed = EndpointSealed {
            secrets: seal_secrets(&sending.vault, &tenant, id, &secrets, random()),
            headers: seal_headers(&sending.vault, &tenant, id, &headers, random()),
        };
        let new = NewEndpoint { id, tenant, settings, sealed };
        match self.store().create_endpoint(new, by_the_app()).await? {
            EndpointChanged::Changed(record) => {
                Ok(AddedEndpoint { id: record.id, secret: shown, public_key })
            }
            EndpointChanged::UidTaken => Err(SendingError::Conflict(
                "another endpoint of this tenant has that uid".to_owned(),
            )),
            EndpointChanged::TooMany => Err(SendingError::Conflict(
                "the tenant has as many endpoints as it may have".to_owned(),
            )),
            EndpointChanged::Deleted
            | EndpointChanged::Unknown
            | EndpointChanged::VersionChanged
            | EndpointChanged::DisabledByOperator => {
                Err(SendingError::Conflict("the endpoint was changed meanwhile".to_owned()))
            }
        }
    }

    /// Gives an endpoint a new secret, which signs as `signing` says, or like the previous one. The
    /// previous secret still signs for `overlap` longer; an overlap of zero revokes every earlier secret
    /// now.
    pub async fn rotate_endpoint(
        &self,
        id: EndpointId,
        overlap: Duration,
        signing: Option<Signing>,
    ) -> Result<AddedEndpoint, SendingError> {
        let sending = self.sending.as_ref().ok_or(SendingError::NotConfigured)?;
        let random = random();
        for _ in 0..CHANGE_TRIES {
            let unknown = || SendingError::Invalid("no endpoint has that id".to_owned());
            let record = self.store().endpoint(id).await?.ok_or_else(unknown)?;
            let version = record.version;
            let secret =
                SigningSecret::generate(signing.unwrap_or(record.settings.signing), &random);
            let (shown, public_key) = (secret.expose(), secret.public_key());
            let nonce = self::random();
            let (settings, sealed) =
                rotated(&sending.vault, record, secret, overlap, Timestamp::now(), nonce)
                    .map_err(|fault| SendingError::Conflict(fault.to_string()))?;
            let act = EndpointAct::Change { version, settings: Box::new(settings), sealed };
            match self.store().change_endpoint(id, act, by_the_app()).await? {
                EndpointChanged::Changed(record) => {
                    let secret = shown.map(|shown| shown.to_string());
                    return Ok(AddedEndpoint { id: record.id, secret, public_key });
                }
                EndpointChanged::Deleted | EndpointChanged::Unknown => return Err(unknown()),
                EndpointChanged::VersionChanged
                | EndpointChanged::UidTaken
                | EndpointChanged::TooMany
                | EndpointChanged::DisabledByOperator => {}
            }
        }
        Err(SendingError::Conflict(
            "other requests keep changing the endpoint: try again".to_owned(),
        ))
    }

    /// Removes an endpoint, and cancels its open deliveries. Returns false if no endpoint has this id.
    pub async fn remove_endpoint(&self, id: EndpointId) -> Result<bool, SendingError> {
        let removed = self.store().change_endpoint(id, EndpointAct::Delete, by_the_app()).await?;
        Ok(removed == EndpointChanged::Deleted)
    }

    /// Publishes a message on its own. In the transaction of a handler, use `publish` of its database handle:
    /// then the message is part of the commit that records "done".
    ///
    /// After `Ok` the message is on disk. The same id with the same content is a duplicate and changes nothing.
    pub async fn publish(&self, message: NewMessage) -> Result<Published, SendingError> {
        if let Some(fault) = message.fault() {
            return Err(SendingError::Invalid(fault));
        }
        Ok(self.store().publish(message).await?)
    }
}

fn by_the_app() -> Action {
    Action { who: "app".to_owned(), reason: None, at: Timestamp::now() }
}

fn random<const BYTES: usize>() -> [u8; BYTES] {
    const { assert!(BYTES == NONCE_BYTES || BYTES == 32) };
    let mut random = [0; BYTES];
    aws_lc_rs::rand::fill(&mut random).expect("the system has random numbers");
    random
}
