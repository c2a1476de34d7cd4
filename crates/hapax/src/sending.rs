//! The sending side of a server: the vault and the client for endpoints, with its rules for addresses. A reload
//! replaces all of it at once, or none of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use hapax_core::store::{EndpointFilter, InspectOutbox, SourceSecretStore, StoreError};
use hapax_core::vault::{KeyId, Vault};
use hapax_engine::{EndpointCaller, GuardRules, Outbound, SenderLimits, SenderSetup};

use crate::config::{Config, InvalidSetting, NO_VAULT_KEY, OutboundSettings};
use crate::tenant_sources;

/// How many endpoints are read at a time.
const PAGE: usize = 200;

/// The parts that are needed to use endpoints.
#[derive(Debug)]
pub(crate) struct SendingParts {
    /// Seals secrets and custom headers.
    pub(crate) vault: Arc<Vault>,
    /// Signs and posts, and knows which addresses endpoints may have.
    pub(crate) endpoint_caller: Arc<EndpointCaller>,
    limits: SenderLimits,
    /// The settings that `endpoint_caller` was made of.
    outbound: OutboundSettings,
}

/// The sending side that is in use, or why endpoints cannot be used.
#[derive(Debug)]
pub(crate) struct SharedSending(ArcSwap<Result<Arc<SendingParts>, String>>);

impl SharedSending {
    pub(crate) fn new(sending: Result<SendingParts, String>) -> Self {
        Self(ArcSwap::from_pointee(sending.map(Arc::new)))
    }

    pub(crate) fn get(&self) -> Result<Arc<SendingParts>, String> {
        Result::clone(&self.0.load())
    }

    pub(crate) fn replace(&self, sending: Result<SendingParts, String>) {
        self.0.store(Arc::new(sending.map(Arc::new)));
    }

    /// The vault, or why there is none.
    pub(crate) fn vault(&self) -> Result<Arc<Vault>, String> {
        self.get().map(|sending| Arc::clone(&sending.vault))
    }

    /// The keys of the vault, the current one first.
    pub(crate) fn vault_keys(&self) -> Vec<KeyId> {
        self.vault().map_or(Vec::new(), |vault| vault.key_ids().collect())
    }

    /// The client and the limits of the sender.
    pub(crate) fn setup(&self) -> Option<SenderSetup> {
        let sending = self.get().ok()?;
        Some(SenderSetup {
            endpoint_caller: Arc::clone(&sending.endpoint_caller),
            limits: sending.limits,
        })
    }
}

impl SendingParts {
    /// The sending side of a configuration, or why endpoints cannot be used. `may_create_key` says that the
    /// database holds no sealed value.
    pub(crate) fn of(config: &Config, may_create_key: bool) -> Result<Self, String> {
        Self::with(config, may_create_key, None)
    }

    /// [`Self::of`] for a reload. The client of `before` stays in use if its settings are
    /// unchanged.
    fn with(config: &Config, may_create_key: bool, before: Option<&Self>) -> Result<Self, String> {
        let outbound = config.settings.outbound.clone();
        let vault = config
            .vault
            .open(may_create_key)
            .map_err(|InvalidSetting { problem, hint }| format!("[vault] {problem}; {hint}"))?
            .ok_or(NO_VAULT_KEY)?;
        let vault = Arc::new(vault);
        let limits = SenderLimits {
            in_flight_max: outbound.max_in_flight,
            in_flight_bytes_max: outbound.max_in_flight_bytes,
        };
        let same = before.filter(|before| before.outbound.has_same_way_out(&outbound));
        if let Some(before) = same {
            let endpoint_caller = Arc::new(before.endpoint_caller.with_vault(Arc::clone(&vault)));
            return Ok(Self { vault, endpoint_caller, limits, outbound });
        }
        let (allow, ports) = (outbound.allow.clone(), outbound.ports.clone());
        let rules = GuardRules::new(allow, ports, outbound.proxy.clone());
        let client = Outbound::guarded(rules).map_err(|error| error.to_string())?;
        let endpoint_caller = Arc::new(EndpointCaller::new(client, Arc::clone(&vault)));
        Ok(Self { vault, endpoint_caller, limits, outbound })
    }
}

/// The sending side at a start. The store must be readable.
pub(crate) async fn at_start<S: InspectOutbox + SourceSecretStore>(
    store: &S,
    config: &Config,
) -> Result<SharedSending, StoreError> {
    // A new key would open none of the secrets that are stored already.
    let any = EndpointFilter { limit: 1, ..EndpointFilter::default() };
    let endpoints = store.endpoints(any).await?;
    let tenants = store.source_secrets().await?;
    let is_empty = endpoints.items.is_empty() && tenants.pairs.is_empty();
    Ok(SharedSending::new(SendingParts::of(config, is_empty)))
}

/// The sending side after a reload, or why the new configuration cannot be applied: a key is missing that a
/// stored value needs.
pub(crate) async fn at_reload<S: InspectOutbox + SourceSecretStore>(
    store: &S,
    config: &Config,
    before: &SharedSending,
) -> Result<Result<SendingParts, String>, String> {
    let before = before.get();
    let after = SendingParts::with(config, false, before.as_deref().ok());
    let Ok(before) = before else { return Ok(after) };
    let known: Vec<KeyId> = after.as_ref().map_or(Vec::new(), |it| it.vault.key_ids().collect());
    let dropped: Vec<KeyId> = before.vault.key_ids().filter(|key| !known.contains(key)).collect();
    if dropped.is_empty() {
        return Ok(after);
    }
    let uses = sealed_values(store).await.map_err(|error| {
        format!("cannot check which keys of the vault are in use, so none is removed: {error}")
    })?;
    for key in dropped {
        if let Some(values) = uses.get(&key) {
            let why = match &after {
                Err(why) => format!("; {why}"),
                Ok(_) => String::new(),
            };
            return Err(format!(
                "[vault] no longer has the key {key}, which stored values need ({} of them, such as those of \
                 {}): keep it in `old` until `hapax doctor` says that it can be removed{why}",
                values.len(),
                values.first().map_or("", String::as_str),
            ));
        }
    }
    Ok(after)
}

/// The owners of stored values by the key that sealed them.
pub(crate) async fn sealed_values<S: InspectOutbox + SourceSecretStore>(
    store: &S,
) -> Result<BTreeMap<KeyId, Vec<String>>, StoreError> {
    let mut uses: BTreeMap<KeyId, Vec<String>> = BTreeMap::new();
    let mut before = None;
    loop {
        let filter = EndpointFilter { before, limit: PAGE, ..EndpointFilter::default() };
        let page = store.endpoints(filter).await?;
        for record in &page.items {
            for key in record.sealed.key_ids() {
                let values = uses.entry(key).or_default();
                let owner = format!("the endpoint {}", record.id);
                if values.last() != Some(&owner) {
                    values.push(owner);
                }
            }
        }
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    for record in store.source_secrets().await?.pairs {
        if let Ok(sealed) = &record.sealed {
            let owner = format!("the tenant {}", tenant_sources::label(&record.pair));
            uses.entry(sealed.key_id()).or_default().push(owner);
        }
    }
    Ok(uses)
}
