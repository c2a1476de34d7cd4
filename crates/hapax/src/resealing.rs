//! Seals stored values again after the key of the vault was replaced, so that the old key can be removed.
//!
//! One pass over all values follows each start and each reload, and is repeated only if the store failed.
//! While nodes switch to the new key one by one, a node with the old key may seal again a value that a node
//! with the new key had sealed. Such a reversal happens at most once for each node and value, and the pass of
//! the node that switches last leaves every value under the new key.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::endpoint::{EndpointAct, EndpointChanged, EndpointRecord, EndpointSealed};
use hapax_core::store::{
    Action, EndpointFilter, InspectOutbox, Outbox, SourceSecretStore, StoreError,
};
use hapax_core::vault::{OpenError, SealContext, Vault};
use hapax_engine::Now;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::sending::SharedSending;
use crate::tenant_sources::{TenantSources, nonce};

/// How many endpoints are read at a time.
const PAGE: usize = 200;

/// How long to wait before a pass that failed in the store is repeated.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// The most attempts to seal a value that others change at the same time.
const TRIES: usize = 5;

/// Seals stored values with the current key.
pub(crate) struct Resealer<S> {
    store: Arc<S>,
    sending: Arc<SharedSending>,
    tenants: Arc<TenantSources<S>>,
    now: Now,
    reloaded: Notify,
}

impl<S: Outbox + InspectOutbox + SourceSecretStore> Resealer<S> {
    pub(crate) fn new(
        store: Arc<S>,
        sending: Arc<SharedSending>,
        tenants: Arc<TenantSources<S>>,
        now: Now,
    ) -> Self {
        Self { store, sending, tenants, now, reloaded: Notify::new() }
    }

    /// Starts another pass: the vault may have other keys.
    pub(crate) fn reload(&self) {
        self.reloaded.notify_one();
    }

    /// Passes over all values now and after each reload, until `stop`.
    pub(crate) async fn run(&self, stop: CancellationToken) {
        loop {
            let passed = match self.sending.vault() {
                Ok(vault) => stop.run_until_cancelled(self.pass(&vault)).await,
                Err(_no_vault) => Some(Ok(())),
            };
            match passed {
                None => return,
                Some(Ok(())) => {
                    if stop.run_until_cancelled(self.reloaded.notified()).await.is_none() {
                        return;
                    }
                }
                Some(Err(error)) => {
                    tracing::warn!(%error, "sealing stored values with the current key of the vault: {error}");
                    stop.run_until_cancelled(tokio::time::sleep(AGAIN_AFTER)).await;
                }
            }
        }
    }

    async fn pass(&self, vault: &Vault) -> Result<(), StoreError> {
        let mut sealed = self.tenants.reseal(&self.action(vault)).await?;
        let mut before = None;
        loop {
            let filter = EndpointFilter { before, limit: PAGE, ..EndpointFilter::default() };
            let page = self.store.endpoints(filter).await?;
            for record in page.items.into_iter().filter(|record| needs_reseal(vault, record)) {
                sealed += usize::from(self.reseal(vault, record).await?);
            }
            before = page.next;
            if before.is_none() {
                break;
            }
        }
        if sealed > 0 {
            let key = vault.current_key_id();
            tracing::info!(key = %key, "sealed {sealed} stored values with the key {key} of the vault");
        }
        Ok(())
    }

    /// Seals the values of one endpoint; false if they cannot be opened, or were changed or removed meanwhile.
    async fn reseal(&self, vault: &Vault, record: EndpointRecord) -> Result<bool, StoreError> {
        let id = record.id;
        let mut found = Some(record);
        for _ in 0..TRIES {
            let Some(record) = found.take().filter(|record| needs_reseal(vault, record)) else {
                return Ok(false);
            };
            let sealed = match again(vault, &record) {
                Ok(sealed) => sealed,
                Err(error) => {
                    tracing::warn!(endpoint = %id, %error, "the secrets of the endpoint {id} cannot be opened: {error}");
                    return Ok(false);
                }
            };
            let (version, settings) = (record.version, Box::new(record.settings));
            let act = EndpointAct::Change { version, settings, sealed };
            match self.store.change_endpoint(id, act, self.action(vault)).await? {
                EndpointChanged::Changed(_) => return Ok(true),
                EndpointChanged::VersionChanged => found = self.store.endpoint(id).await?,
                EndpointChanged::Deleted
                | EndpointChanged::Unknown
                | EndpointChanged::UidTaken
                | EndpointChanged::TooMany
                | EndpointChanged::DisabledByOperator => return Ok(false),
            }
        }
        Err(StoreError::Busy)
    }

    fn action(&self, vault: &Vault) -> Action {
        let reason = format!("sealed with the key {} of the vault", vault.current_key_id());
        Action { who: "hapax".to_owned(), reason: Some(reason), at: (self.now)() }
    }
}

fn needs_reseal(vault: &Vault, record: &EndpointRecord) -> bool {
    let EndpointSealed { secrets, headers } = &record.sealed;
    vault.needs_reseal(secrets)
        || headers.as_ref().is_some_and(|headers| vault.needs_reseal(headers))
}

fn again(vault: &Vault, record: &EndpointRecord) -> Result<EndpointSealed, OpenError> {
    let id = record.id.to_string();
    let seal = |context: SealContext<'_>, sealed| {
        let opened = vault.open(&context, sealed)?;
        Ok(vault.seal(&context, &opened, nonce()))
    };
    let EndpointSealed { secrets, headers } = &record.sealed;
    let of_headers = SealContext::endpoint_headers(&record.tenant, &id);
    Ok(EndpointSealed {
        secrets: seal(SealContext::endpoint_secrets(&record.tenant, &id), secrets)?,
        headers: headers.as_ref().map(|headers| seal(of_headers, headers)).transpose()?,
    })
}
