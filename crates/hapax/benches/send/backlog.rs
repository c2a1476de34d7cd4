//! The cost of a claim with a thousand deliveries waiting and with a million, over as many
//! endpoints, and the memory that a server needs with the large backlog.
//!
//! Deliveries are claimed inside the server, so this bench opens both stores itself and makes the calls that the
//! sender makes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use hapax_core::endpoint::{
    EndpointChanged, EndpointId, EndpointSealed, EndpointSettings, NewEndpoint,
};
use hapax_core::endpoint_secret::{EndpointSecrets, Signing, SigningSecret};
use hapax_core::message::{MessageData, NewMessage};
use hapax_core::store::{
    Action, AttemptOutcome, AttemptVerdict, DeliveryAsk, HandlerAnswer, Outbox as _, Published,
};
use hapax_core::vault::{NONCE_BYTES, SealContext, Vault, VaultKey};
use hapax_core::{Tenant, Timestamp};
use hapax_store::{SqliteOptions, SqliteStore};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::publish::data;
use crate::shared::figures::{Figure, mebibytes, thousands};
use crate::shared::report::{Table, column};
use crate::shared::server::Usage;
use crate::sink::Sink;
use crate::{Options, VAULT_KEY, server};

/// Endpoints of each tenant: the most that a tenant may have. One message for the tenant makes this
/// many deliveries.
const PER_TENANT: u64 = 1_000;

/// The most deliveries that one call claims.
const LIMIT: usize = 64;

/// Calls from one store before the other has its turn; they take most of the small backlog.
const TURN: usize = 12;

/// Writes under way at once while a store is filled.
const FILLING: usize = 256;

/// The most bytes of bodies that one call may claim.
const BYTES_MAX: usize = 64 << 20;

/// How long the server runs before its memory usage is read.
const SETTLED: Duration = Duration::from_secs(3);

/// The claims from one store.
#[derive(Default)]
pub(crate) struct Claims {
    deliveries: usize,
    time: Duration,
    each_us: Vec<u128>,
}

impl Claims {
    fn us_per_delivery(&self) -> f64 {
        self.time.as_secs_f64() * 1e6 / self.deliveries as f64
    }

    fn us_p50(&self) -> f64 {
        let mut sorted = self.each_us.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).map_or(0.0, |us| *us as f64)
    }
}

/// The same number of claims from either store, and the memory of a server with the large backlog.
pub(crate) struct Backlog {
    deliveries: u64,
    endpoints: u64,
    small: Claims,
    large: Claims,
    usage: Usage,
}

impl Backlog {
    pub(crate) fn table(&self) -> Table {
        let columns =
            [column("claimed", 0), column("us each", 1), column("p50 us", 0), column("MiB", 1)];
        let endpoints = thousands(self.endpoints as f64);
        let title = format!("claims of {LIMIT}, {endpoints} endpoints");
        let mut table = Table::new(title, columns);
        let memory = Some(mebibytes(self.usage.resident_bytes_peak));
        let sides = [(PER_TENANT, &self.small, None), (self.deliveries, &self.large, memory)];
        for (waiting, claims, memory) in sides {
            let numbers =
                [claims.deliveries as f64, claims.us_per_delivery(), claims.us_p50()].map(Some);
            let name = format!("{} waiting", thousands(waiting as f64));
            table.row(name, numbers.into_iter().chain([memory]));
        }
        table.note("MiB: the peak of a server that starts with this backlog");
        table
    }

    pub(crate) fn figures(&self) -> [Figure; 2] {
        let waiting = thousands(self.deliveries as f64);
        let ratio = self.large.us_per_delivery() / self.small.us_per_delivery();
        let memory = mebibytes(self.usage.resident_bytes_peak);
        [
            Figure::lower(format!("a claim with {waiting} waiting, to 1,000"), ratio, 1.3, 1.1),
            Figure::lower(format!("memory with {waiting} waiting, MiB"), memory, 256.0, 96.0),
        ]
    }
}

pub(crate) async fn measure(options: &Options, directory: &Path) -> anyhow::Result<Backlog> {
    let sink = Sink::start()?;
    sink.close().await?;
    let small = Filled::open(&directory.join("small"))?;
    let large = Filled::open(&directory.join("large"))?;
    for store in [&small, &large] {
        store.add_endpoints(options.endpoints, &sink.url()).await?;
    }
    large.publish(options.backlog / PER_TENANT, options.endpoints).await?;
    let (mut small_claims, mut large_claims) = (Claims::default(), Claims::default());
    for _ in 0..options.claims.div_ceil(TURN) {
        small.publish(1, options.endpoints).await?;
        small.claim(&mut small_claims).await?;
        large.claim(&mut large_claims).await?;
    }
    // The server opens the files that this process had open.
    let directory = large.close().await;
    let hapax = server(options, &directory, None, "")?;
    tokio::time::sleep(SETTLED).await;
    Ok(Backlog {
        deliveries: options.backlog,
        endpoints: options.endpoints,
        small: small_claims,
        large: large_claims,
        usage: hapax.usage()?,
    })
}

/// A store of this process, in the data directory of a server.
struct Filled {
    directory: PathBuf,
    store: Arc<SqliteStore>,
    vault: Arc<Vault>,
}

impl Filled {
    fn open(directory: &Path) -> anyhow::Result<Self> {
        let store = SqliteStore::open(SqliteOptions::new(directory.join("data")))?;
        let key = VaultKey::from_base64(VAULT_KEY).context("the vault's key")?;
        let vault = Vault::new(key, Vec::new()).context("the vault")?;
        Ok(Self { directory: directory.to_owned(), store: Arc::new(store), vault: Arc::new(vault) })
    }

    async fn close(self) -> PathBuf {
        self.store.close().await;
        self.directory
    }

    async fn add_endpoints(&self, endpoints: u64, url: &str) -> anyhow::Result<()> {
        let mut writes = JoinSet::new();
        for n in 0..endpoints {
            let (store, vault) = (Arc::clone(&self.store), Arc::clone(&self.vault));
            let (tenant, settings) = (tenant(n / PER_TENANT), EndpointSettings::at(url));
            writes.spawn(async move {
                let id = EndpointId(Uuid::now_v7());
                let name = id.to_string();
                let secrets =
                    EndpointSecrets::new(SigningSecret::generate(Signing::Standard, &[7; 32]));
                let context = SealContext::endpoint_secrets(&tenant, &name);
                let mut nonce = [0; NONCE_BYTES];
                aws_lc_rs::rand::fill(&mut nonce).context("random numbers")?;
                let secrets = vault.seal(&context, &secrets.to_bytes(), nonce);
                let sealed = EndpointSealed { secrets, headers: None };
                let new = NewEndpoint { id, tenant, settings, sealed };
                let by = Action { who: "bench".to_owned(), reason: None, at: Timestamp::now() };
                let changed = store.create_endpoint(new, by).await?;
                ensure!(matches!(changed, EndpointChanged::Changed(_)), "{changed:?}");
                Ok(())
            });
            at_most(&mut writes, FILLING).await?;
        }
        at_most(&mut writes, 0).await
    }

    /// Publishes messages for one tenant after the other. Each message makes [`PER_TENANT`]
    /// deliveries.
    async fn publish(&self, messages: u64, endpoints: u64) -> anyhow::Result<()> {
        let mut writes = JoinSet::new();
        let tenants = endpoints.div_ceil(PER_TENANT);
        for n in 0..messages {
            let store = Arc::clone(&self.store);
            let data = MessageData::parse(data())?;
            let message = NewMessage::new("bench.sent", data)
                .with_tenant(tenant(n % tenants).as_str())
                .with_id(Uuid::now_v7().simple().to_string());
            writes.spawn(async move {
                let published = store.publish(message).await?;
                ensure!(matches!(published, Published::Accepted(_)), "{published:?}");
                Ok(())
            });
            at_most(&mut writes, FILLING).await?;
        }
        at_most(&mut writes, 0).await
    }

    /// One turn. Another call, outside the measured time, settles the claims: a call has a bounded
    /// share of the writer's time, and settling would use up some of it.
    async fn claim(&self, claims: &mut Claims) -> anyhow::Result<()> {
        let ask = |limit| DeliveryAsk {
            limit,
            bytes_max: BYTES_MAX,
            node: Arc::from("bench"),
            vault_keys: self.vault.key_ids().collect(),
            claims_ahead: false,
        };
        for _ in 0..TURN {
            let began = Instant::now();
            let exchanged = self.store.exchange(Vec::new(), ask(LIMIT)).await?;
            let took = began.elapsed();
            ensure!(!exchanged.claims.is_empty(), "a claim had no delivery");
            claims.deliveries += exchanged.claims.len();
            claims.time += took;
            claims.each_us.push(took.as_micros());
            let settled = exchanged.claims.into_iter().map(|claim| AttemptOutcome {
                delivery: claim.delivery,
                fence: claim.fence,
                took: Duration::from_millis(1),
                verdict: AttemptVerdict::Delivered(HandlerAnswer {
                    status: 200,
                    body: "ok".to_owned(),
                }),
            });
            self.store.exchange(settled.collect(), ask(0)).await?;
        }
        Ok(())
    }
}

fn tenant(n: u64) -> Tenant {
    Tenant::new(format!("tenant-{n}"))
}

/// Waits until at most this many writes are under way.
pub(crate) async fn at_most(
    writes: &mut JoinSet<anyhow::Result<()>>,
    count: usize,
) -> anyhow::Result<()> {
    while writes.len() > count {
        if let Some(ended) = writes.join_next().await {
            ended.context("a write panicked")??;
        }
    }
    Ok(())
}
