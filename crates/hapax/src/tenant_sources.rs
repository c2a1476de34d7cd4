//! Tenants of sources that operators add while the server runs: their secrets are sealed in the database, and
//! every node serves them within a second.
//!
//! A node polls the version of all stored secrets, and reads the secrets when the version has changed. A node decides
//! about a change by one version of the set. The store refuses the change if the set has another version by then. The
//! rule that no two pairs share a secret therefore holds across nodes, although the database cannot read a secret.
//!
//! Requests for a pair whose secrets cannot be opened get a 503, so that the sender retries. The config
//! defines each source, and takes precedence if it declares the same pair.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use hapax_core::limits::TENANT_SOURCES_MAX;
use hapax_core::message::{OWN_TENANT, own_tenant_fault};
use hapax_core::secret::ActiveSecret;
use hapax_core::source_secrets::SourceSecrets;
use hapax_core::store::{
    Action, SourcePair, SourceSecretRecord, SourceSecretStore, SourceSecretsAct,
    SourceSecretsChange, SourceSecretsChanged, StoreError,
};
use hapax_core::vault::{NONCE_BYTES, OpenError, SealContext, Sealed, Vault};
use hapax_core::{KeyHash, Source, SourceName, Tenant, Timestamp, tuned};
use hapax_engine::{RouteChange, RouteSpec, TenantVerifiers};
use tokio::sync::Mutex;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::alerts::SecretEnds;
use crate::config::{Config, SourceTemplate, secret_text_hash, units};

/// How often a node reads the version of the stored secrets: a change takes effect on every node within a
/// second.
const POLL_EVERY: Duration = Duration::from_millis(400);

/// The most attempts at a change, each of which fails if another change comes between reading and writing.
const CHANGE_TRIES: usize = 10;

/// Applies a changed set of tenants to the routing table and to the workers that sign with the
/// secrets.
pub(crate) type Apply = Box<dyn Fn(Vec<RouteChange>, TenantVerifiers) + Send + Sync>;

/// The tenants that were added at run time.
pub(crate) struct TenantSources<S> {
    store: Arc<S>,
    apply: Apply,
    /// Held during a change, a refresh or a reload: only one runs at a time on this node.
    state: Mutex<AppliedSecrets>,
    /// When the secrets of each served pair end, for alerts.
    ends: RwLock<Vec<SecretEnds>>,
}

/// The part of a configuration that decides about tenants.
#[derive(Debug)]
pub(crate) struct TenantRules {
    templates: HashMap<SourceName, SourceTemplate>,
    configured: HashSet<SourcePair>,
    owners: SecretOwners,
    /// The vault, or why there is none.
    vault: Result<Arc<Vault>, String>,
}

/// The pair that has each secret.
#[derive(Debug, Clone, Default)]
struct SecretOwners {
    /// Pairs by the hash of the secret's text.
    texts: HashMap<KeyHash, String>,
    /// Pairs by the hash of the decoded key: one secret can be written in several ways.
    keys: HashMap<KeyHash, String>,
}

struct AppliedSecrets {
    rules: TenantRules,
    /// The version of the set that is applied; `None` before the first read.
    version: Option<u64>,
    pairs: BTreeMap<SourcePair, StoredPair>,
}

/// A stored pair.
#[derive(Debug, Clone)]
struct StoredPair {
    sealed: Result<Sealed, OpenError>,
    set_at: Timestamp,
    state: PairState,
}

#[derive(Debug, Clone)]
enum PairState {
    /// Its requests are verified.
    Served(Arc<Served>),
    /// Its requests get a 503, for this reason.
    Unavailable {
        why: String,
        /// Whether its secrets could be opened. Secrets that could not be opened cannot be compared with
        /// others.
        is_opened: bool,
    },
    /// Its secrets are not used, for this reason: the config has no such source, or declares the pair itself.
    Unused(String),
}

#[derive(Debug)]
struct Served {
    source: Arc<Source>,
    until: Vec<Option<Timestamp>>,
    texts: Vec<KeyHash>,
}

/// The facts about the secrets of a pair that an operator may see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PairSummary {
    pub(crate) pair: SourcePair,
    /// When its secrets were set.
    pub(crate) set_at: Timestamp,
    /// When each secret ends, or why they are not used.
    pub(crate) secrets: Result<Vec<Option<Timestamp>>, String>,
}

/// Why the secrets of a pair are not changed. Nothing was changed.
#[derive(Debug)]
pub(crate) enum SecretsRefused {
    /// The request is wrong.
    Invalid(String),
    /// There is no such source, or nothing to remove.
    Unknown(String),
    /// The change conflicts with another pair or with the config.
    Conflict(String),
    /// The change cannot be decided or stored now.
    Unavailable(String),
}

impl From<StoreError> for SecretsRefused {
    fn from(error: StoreError) -> Self {
        Self::Unavailable(error.to_string())
    }
}

impl TenantRules {
    /// The rules of this configuration.
    pub(crate) fn of(config: &Config, vault: Result<Arc<Vault>, String>) -> Self {
        let mut owners = SecretOwners::default();
        for configured in &config.sources {
            let label = label(&pair_of(&configured.source));
            owners.insert(
                &configured.secret_texts,
                configured.source.scheme().key_hashes(),
                &label,
            );
        }
        let templates = config.templates.iter().cloned();
        Self {
            templates: templates.map(|template| (template.spec.name.clone(), template)).collect(),
            configured: config.sources.iter().map(|it| pair_of(&it.source)).collect(),
            owners,
            vault,
        }
    }

    /// The rules of a server that has neither a source nor a vault.
    #[cfg(test)]
    pub(crate) fn none(why_no_vault: &str) -> Self {
        Self {
            templates: HashMap::new(),
            configured: HashSet::new(),
            owners: SecretOwners::default(),
            vault: Err(why_no_vault.to_owned()),
        }
    }

    /// Decides about a stored pair, apart from secrets that it shares with others.
    fn judge(&self, record: &SourceSecretRecord) -> PairState {
        let SourcePair { tenant, source } = &record.pair;
        let unopened = |why: String| PairState::Unavailable { why, is_opened: false };
        let opened = match self.open(&record.pair, &record.sealed) {
            Ok(opened) => opened,
            Err(why) => return unopened(why),
        };
        let Some(template) = self.templates.get(source) else {
            return PairState::Unused(format!("the config has no source {source}"));
        };
        if self.configured.contains(&record.pair) {
            let why =
                "the config declares secrets for this tenant of the source, and they are used";
            return PairState::Unused(why.to_owned());
        }
        match template.source_for(tenant.clone(), opened.secrets().to_vec()) {
            Ok(source) => PairState::Served(Arc::new(Served::new(source, opened.secrets()))),
            Err(error) => PairState::Unavailable { why: error.problem, is_opened: true },
        }
    }

    fn open(
        &self,
        SourcePair { tenant, source }: &SourcePair,
        sealed: &Result<Sealed, OpenError>,
    ) -> Result<SourceSecrets, String> {
        let sealed = sealed.as_ref().map_err(ToString::to_string)?;
        let vault = self.vault.as_ref().map_err(Clone::clone)?;
        let context = SealContext::source_secrets(tenant, source);
        let bytes = vault.open(&context, sealed).map_err(|error| error.to_string())?;
        SourceSecrets::from_bytes(&bytes).map_err(|error| error.to_string())
    }

    /// The source of a pair with these secrets, or why it cannot have them.
    fn check(&self, pair: &SourcePair, secrets: &SourceSecrets) -> Result<Served, SecretsRefused> {
        let SourcePair { tenant, source } = pair;
        units::name(tenant.as_str()).map_err(|invalid| {
            SecretsRefused::Invalid(format!("tenant: {}; {}", invalid.problem, invalid.hint))
        })?;
        if tenant.as_str() == OWN_TENANT {
            return Err(SecretsRefused::Invalid(own_tenant_fault()));
        }
        let template = self.templates.get(source).ok_or_else(|| {
            SecretsRefused::Unknown(format!(
                "the config has no source {}: add [sources.NAME] first",
                source.as_str().escape_debug()
            ))
        })?;
        if template.spec.envelope.tenant_from.is_some() {
            return Err(SecretsRefused::Conflict(format!(
                "the source {source} takes the tenant from a field of its events (tenant_from), so its \
                 tenants have no secrets of their own"
            )));
        }
        if self.configured.contains(pair) {
            return Err(SecretsRefused::Conflict(format!(
                "the config declares the secrets of {}: change them there",
                label(pair)
            )));
        }
        // Here `env:` and `file:` would be part of the secret itself, which the operator cannot
        // mean.
        let from_config = |one: &ActiveSecret| {
            let text = one.secret.expose();
            text.starts_with("env:") || text.starts_with("file:")
        };
        if secrets.secrets().iter().any(from_config) {
            let why = "env: and file: are read from the config only: send the secret itself";
            return Err(SecretsRefused::Invalid(why.to_owned()));
        }
        let source =
            template.source_for(tenant.clone(), secrets.secrets().to_vec()).map_err(|error| {
                SecretsRefused::Invalid(format!("{}; {}", error.problem, error.hint))
            })?;
        let keys = source.scheme().key_hashes();
        if keys.iter().enumerate().any(|(place, key)| keys[..place].contains(key)) {
            return Err(SecretsRefused::Invalid("the same secret was given twice".to_owned()));
        }
        Ok(Served::new(source, secrets.secrets()))
    }
}

impl SecretOwners {
    fn insert(&mut self, texts: &[KeyHash], keys: &[KeyHash], label: &str) {
        self.texts.extend(texts.iter().map(|text| (*text, label.to_owned())));
        self.keys.extend(keys.iter().map(|key| (*key, label.to_owned())));
    }

    /// A pair that has one of these secrets.
    fn owner(&self, served: &Served) -> Option<&str> {
        let by_text = served.texts.iter().find_map(|text| self.texts.get(text));
        let keys = served.source.scheme().key_hashes();
        by_text.or_else(|| keys.iter().find_map(|key| self.keys.get(key))).map(String::as_str)
    }

    fn insert_served(&mut self, served: &Served, label: &str) {
        self.insert(&served.texts, served.source.scheme().key_hashes(), label);
    }
}

impl Served {
    fn new(source: Source, secrets: &[ActiveSecret]) -> Self {
        Self {
            source: Arc::new(source),
            until: secrets.iter().map(|one| one.until).collect(),
            texts: secrets.iter().map(|one| secret_text_hash(&one.secret)).collect(),
        }
    }
}

impl AppliedSecrets {
    /// Decides about these pairs. A served pair whose sealed secrets are unchanged is not opened again, unless `again`
    /// is set.
    fn judge(
        &self,
        mut records: Vec<SourceSecretRecord>,
        again: bool,
    ) -> BTreeMap<SourcePair, StoredPair> {
        // The order decides which of two pairs with one secret is served: the same one on every node.
        records.sort_by(|one, other| (one.set_at, &one.pair).cmp(&(other.set_at, &other.pair)));
        let mut owners = self.rules.owners.clone();
        let mut pairs = BTreeMap::new();
        for record in records {
            let known = self.pairs.get(&record.pair).filter(|known| {
                !again
                    && known.sealed == record.sealed
                    && matches!(known.state, PairState::Served(_))
            });
            let mut pair_state = match known {
                Some(known) => known.state.clone(),
                None => self.rules.judge(&record),
            };
            let label = label(&record.pair);
            if let PairState::Served(served) = &pair_state {
                match owners.owner(served) {
                    Some(other) => {
                        let why = format!("it shares a secret with {other}");
                        pair_state = PairState::Unavailable { why, is_opened: true };
                    }
                    None => owners.insert_served(served, &label),
                }
            }
            let SourceSecretRecord { pair, sealed, set_at } = record;
            pairs.insert(pair, StoredPair { sealed, set_at, state: pair_state });
        }
        pairs
    }

    /// The change of the routing table for a pair in this state.
    fn change(&self, pair: &SourcePair, pair_state: &PairState) -> RouteChange {
        let SourcePair { tenant, source } = pair.clone();
        match (pair_state, self.rules.templates.get(&source)) {
            (PairState::Served(served), Some(template)) => RouteChange::Serve(RouteSpec {
                source: Arc::clone(&served.source),
                rate_limit: template.rate_limit,
                unverified_limit: template.unverified_limit,
                handlers: template.handlers.clone(),
                mode: template.mode,
            }),
            (PairState::Unavailable { .. }, _) => RouteChange::Unavailable { tenant, source },
            (PairState::Unused(_) | PairState::Served(_), _) => {
                RouteChange::Remove { tenant, source }
            }
        }
    }

    /// Every change of the routing table from one set of pairs to another. A pair that the config declares is
    /// left alone.
    fn changes(
        &self,
        before: &BTreeMap<SourcePair, StoredPair>,
        after: &BTreeMap<SourcePair, StoredPair>,
    ) -> Vec<RouteChange> {
        let is_ours = |pair: &SourcePair| !self.rules.configured.contains(pair);
        let gone = before.keys().filter(|pair| is_ours(pair) && !after.contains_key(*pair));
        let gone = gone.map(|SourcePair { tenant, source }| RouteChange::Remove {
            tenant: tenant.clone(),
            source: source.clone(),
        });
        let is_same = |pair: &SourcePair, now: &StoredPair| {
            before.get(pair).is_some_and(|before| match (&before.state, &now.state) {
                (PairState::Served(one), PairState::Served(two)) => Arc::ptr_eq(one, two),
                (PairState::Unavailable { .. }, PairState::Unavailable { .. })
                | (PairState::Unused(_), PairState::Unused(_)) => true,
                (
                    PairState::Served(_) | PairState::Unavailable { .. } | PairState::Unused(_),
                    PairState::Served(_) | PairState::Unavailable { .. } | PairState::Unused(_),
                ) => false,
            })
        };
        let now = after.iter().filter(|(pair, now)| is_ours(pair) && !is_same(pair, now));
        gone.chain(now.map(|(pair, now)| self.change(pair, &now.state))).collect()
    }

    fn verifiers(&self) -> TenantVerifiers {
        let served = self.pairs.iter().filter_map(|(pair, stored)| match &stored.state {
            PairState::Served(served) => {
                let name = (pair.source.clone(), pair.tenant.clone());
                Some((name, Arc::clone(&served.source)))
            }
            PairState::Unavailable { .. } | PairState::Unused(_) => None,
        });
        served.collect()
    }

    /// The owners of all secrets except those of one pair, or why they cannot be known.
    fn owners_beside(&self, pair: &SourcePair) -> Result<SecretOwners, SecretsRefused> {
        let mut owners = self.rules.owners.clone();
        for (other, stored) in self.pairs.iter().filter(|(other, _)| *other != pair) {
            match &stored.state {
                PairState::Served(served) => owners.insert_served(served, &label(other)),
                PairState::Unavailable { why, is_opened: false } => {
                    return Err(SecretsRefused::Unavailable(format!(
                        "the secrets of {} cannot be opened, so it cannot be checked that no two tenants \
                         share one: {why}. Add the key to `old` in [vault], or remove those secrets",
                        label(other)
                    )));
                }
                // The secrets of these pairs are compared with others before they are used.
                PairState::Unavailable { is_opened: true, .. } | PairState::Unused(_) => {}
            }
        }
        Ok(owners)
    }
}

impl<S: SourceSecretStore> TenantSources<S> {
    /// Nothing is read before [`TenantSources::refresh`].
    pub(crate) fn new(store: Arc<S>, rules: TenantRules, apply: Apply) -> Self {
        let state = AppliedSecrets { rules, version: None, pairs: BTreeMap::new() };
        Self { store, apply, state: Mutex::new(state), ends: RwLock::default() }
    }

    /// Reads the stored secrets if they have changed, and applies them.
    pub(crate) async fn refresh(&self) -> Result<(), StoreError> {
        self.refresh_locked(&mut *self.state.lock().await).await.map(drop)
    }

    /// Refreshes several times a second, until `stop`.
    pub(crate) async fn run(&self, stop: CancellationToken) {
        let every = tuned!("tenants.poll_ms", POLL_EVERY.as_millis() as u64);
        let mut beats = interval(Duration::from_millis(every));
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_failing = false;
        while stop.run_until_cancelled(beats.tick()).await.is_some() {
            match stop.run_until_cancelled(self.refresh()).await {
                Some(Err(error)) if !is_failing => {
                    is_failing = true;
                    tracing::warn!(%error, "cannot read the secrets of tenants, the known ones stay: {error}");
                }
                Some(Err(_)) | None => {}
                Some(Ok(())) => is_failing = false,
            }
        }
    }

    /// Applies a new configuration. `swap` gets every pair and replaces the routing table.
    pub(crate) async fn reload(&self, rules: TenantRules, swap: impl FnOnce(Vec<RouteChange>)) {
        let mut state = self.state.lock().await;
        state.rules = rules;
        let records = state.pairs.iter().map(|(pair, stored)| SourceSecretRecord {
            pair: pair.clone(),
            sealed: stored.sealed.clone(),
            set_at: stored.set_at,
        });
        let pairs = state.judge(records.collect(), true);
        log_pair_states(&state.pairs, &pairs);
        let changes = state.changes(&BTreeMap::new(), &pairs);
        state.pairs = pairs;
        swap(changes);
        (self.apply)(Vec::new(), state.verifiers());
        self.note_ends(&state);
    }

    /// The facts about the secrets of a pair that an operator may see, read from the store.
    pub(crate) async fn show(&self, pair: &SourcePair) -> Result<PairSummary, SecretsRefused> {
        let mut state = self.state.lock().await;
        self.refresh_locked(&mut state).await?;
        summary(&state, pair)
    }

    /// Sets the secrets of a pair. This node serves the pair when the call returns.
    pub(crate) async fn set(
        &self,
        pair: &SourcePair,
        secrets: &SourceSecrets,
        by: Action,
    ) -> Result<PairSummary, SecretsRefused> {
        let mut state = self.state.lock().await;
        for _ in 0..CHANGE_TRIES {
            let version = self.refresh_locked(&mut state).await?;
            let served = state.rules.check(pair, secrets)?;
            if let Some(owner) = state.owners_beside(pair)?.owner(&served) {
                return Err(SecretsRefused::Conflict(format!(
                    "{owner} has the same secret: give each tenant its own, so that a signature identifies \
                     one of them"
                )));
            }
            let vault = state.rules.vault.as_ref();
            let vault = vault.map_err(|why| SecretsRefused::Unavailable(why.clone()))?;
            let context = SealContext::source_secrets(&pair.tenant, &pair.source);
            let sealed = vault.seal(&context, &secrets.to_bytes(), nonce());
            let act = SourceSecretsAct::Set(sealed);
            match self.change(version, pair, act, &by).await? {
                SourceSecretsChanged::Changed { .. } => {
                    self.refresh_locked(&mut state).await?;
                    return summary(&state, pair);
                }
                SourceSecretsChanged::VersionChanged => {}
                SourceSecretsChanged::TooMany => {
                    return Err(SecretsRefused::Conflict(format!(
                        "there are {TENANT_SOURCES_MAX} tenants with secrets of their own, the most that \
                         there may be"
                    )));
                }
                SourceSecretsChanged::Unknown => return Err(unknown(pair)),
            }
        }
        Err(contended())
    }

    /// Removes the secrets of a pair: its requests get a 404.
    pub(crate) async fn remove(&self, pair: &SourcePair, by: Action) -> Result<(), SecretsRefused> {
        let mut state = self.state.lock().await;
        for _ in 0..CHANGE_TRIES {
            let version = self.refresh_locked(&mut state).await?;
            match self.change(version, pair, SourceSecretsAct::Delete, &by).await? {
                SourceSecretsChanged::Changed { .. } => {
                    self.refresh_locked(&mut state).await?;
                    return Ok(());
                }
                SourceSecretsChanged::VersionChanged => {}
                SourceSecretsChanged::Unknown | SourceSecretsChanged::TooMany => {
                    return Err(unknown(pair));
                }
            }
        }
        Err(contended())
    }

    /// Seals again every pair that is sealed with an old key of the vault, and returns how many. A pair that
    /// cannot be opened stays as it is.
    pub(crate) async fn reseal(&self, by: &Action) -> Result<usize, StoreError> {
        let mut state = self.state.lock().await;
        let mut count = 0;
        for _ in 0..CHANGE_TRIES {
            let mut version = self.refresh_locked(&mut state).await?;
            let Ok(vault) = state.rules.vault.clone() else { return Ok(count) };
            let mut is_overtaken = false;
            for (pair, stored) in &state.pairs {
                let Ok(sealed) = &stored.sealed else { continue };
                let context = SealContext::source_secrets(&pair.tenant, &pair.source);
                if !vault.needs_reseal(sealed) {
                    continue;
                }
                let Ok(opened) = vault.open(&context, sealed) else { continue };
                let act = SourceSecretsAct::Reseal(vault.seal(&context, &opened, nonce()));
                match self.change(version, pair, act, by).await? {
                    SourceSecretsChanged::Changed { version: newer } => {
                        version = newer;
                        count += 1;
                    }
                    SourceSecretsChanged::VersionChanged => {
                        is_overtaken = true;
                        break;
                    }
                    SourceSecretsChanged::Unknown | SourceSecretsChanged::TooMany => {}
                }
            }
            if !is_overtaken {
                self.refresh_locked(&mut state).await?;
                return Ok(count);
            }
        }
        Err(StoreError::Busy)
    }

    /// When the secrets of each served pair end.
    pub(crate) fn secret_ends(&self) -> Vec<SecretEnds> {
        self.ends.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn change(
        &self,
        version: u64,
        pair: &SourcePair,
        act: SourceSecretsAct,
        by: &Action,
    ) -> Result<SourceSecretsChanged, StoreError> {
        let change = SourceSecretsChange { version, pair: pair.clone(), act };
        self.store.change_source_secrets(change, by.clone()).await
    }

    /// Reads the stored secrets if they have changed, applies them, and returns their version.
    async fn refresh_locked(&self, state: &mut AppliedSecrets) -> Result<u64, StoreError> {
        let version = self.store.source_secrets_version().await?;
        if state.version == Some(version) {
            return Ok(version);
        }
        let set = self.store.source_secrets().await?;
        let pairs = state.judge(set.pairs, false);
        log_pair_states(&state.pairs, &pairs);
        let changes = state.changes(&state.pairs, &pairs);
        state.pairs = pairs;
        state.version = Some(set.version);
        (self.apply)(changes, state.verifiers());
        self.note_ends(state);
        Ok(set.version)
    }

    fn note_ends(&self, state: &AppliedSecrets) {
        let ends = state.pairs.iter().filter_map(|(pair, stored)| match &stored.state {
            PairState::Served(served) => Some(SecretEnds {
                source: pair.source.clone(),
                tenant: pair.tenant.to_string(),
                verifiers: served.source.verifiers().to_vec(),
                until: served.until.clone(),
            }),
            PairState::Unavailable { .. } | PairState::Unused(_) => None,
        });
        *self.ends.write().unwrap_or_else(PoisonError::into_inner) = ends.collect();
    }
}

/// Logs pairs that can no longer be served, and those that can again.
fn log_pair_states(
    before: &BTreeMap<SourcePair, StoredPair>,
    after: &BTreeMap<SourcePair, StoredPair>,
) {
    for (pair, stored) in after {
        let was = before.get(pair).map(|before| &before.state);
        let name = label(pair);
        match (was, &stored.state) {
            (Some(PairState::Unavailable { why: was, .. }), PairState::Unavailable { why, .. })
                if was == why => {}
            (Some(PairState::Unused(was)), PairState::Unused(why)) if was == why => {}
            (_, PairState::Unavailable { why, .. }) => tracing::error!(
                tenant = %pair.tenant,
                source = %pair.source,
                "the secrets of {name} cannot be used, and its requests get a 503: {why}"
            ),
            (_, PairState::Unused(why)) => tracing::warn!(
                tenant = %pair.tenant,
                source = %pair.source,
                "the secrets of {name} that were set at run time are not used: {why}"
            ),
            (Some(PairState::Unavailable { .. }), PairState::Served(_)) => tracing::info!(
                tenant = %pair.tenant,
                source = %pair.source,
                "the secrets of {name} can be used again"
            ),
            (Some(PairState::Served(_) | PairState::Unused(_)) | None, PairState::Served(_)) => {}
        }
    }
}

fn summary(state: &AppliedSecrets, pair: &SourcePair) -> Result<PairSummary, SecretsRefused> {
    let stored = state.pairs.get(pair).ok_or_else(|| unknown(pair))?;
    let secrets = match &stored.state {
        PairState::Served(served) => Ok(served.until.clone()),
        PairState::Unavailable { why, .. } | PairState::Unused(why) => Err(why.clone()),
    };
    Ok(PairSummary { pair: pair.clone(), set_at: stored.set_at, secrets })
}

fn unknown(pair: &SourcePair) -> SecretsRefused {
    SecretsRefused::Unknown(format!("no secrets were set at run time for {}", label(pair)))
}

fn contended() -> SecretsRefused {
    SecretsRefused::Unavailable(
        "other secrets are being changed at the same time: try again".to_owned(),
    )
}

fn pair_of(source: &Source) -> SourcePair {
    SourcePair { tenant: source.tenant().clone(), source: source.name().clone() }
}

/// A pair as it is written in messages.
pub(crate) fn label(SourcePair { tenant, source }: &SourcePair) -> String {
    match *tenant == Tenant::default() {
        true => source.as_str().escape_debug().to_string(),
        false => format!("{}/{}", tenant.as_str().escape_debug(), source.as_str().escape_debug()),
    }
}

/// A random nonce for one value.
pub(crate) fn nonce() -> [u8; NONCE_BYTES] {
    let mut nonce = [0; NONCE_BYTES];
    aws_lc_rs::rand::fill(&mut nonce).expect("the system has random numbers");
    nonce
}
