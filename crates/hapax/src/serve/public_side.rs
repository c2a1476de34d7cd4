//! The side for senders and callers: webhooks and proxies.

use std::sync::Arc;

use anyhow::Context as _;
use hapax_engine::limits::HttpLimits;
use hapax_engine::tls::ServerConfig;
use hapax_engine::{Drained, serve_ingress, serve_proxy};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::ServerStore;
use super::parts::Parts;

/// The listeners that accept requests until the shutdown begins.
pub(super) struct PublicSide {
    ingress: Option<JoinHandle<Drained>>,
    proxies: Vec<JoinHandle<Drained>>,
}

impl PublicSide {
    pub(super) fn start<S: ServerStore>(
        parts: &Parts<S>,
        ingress: Option<TcpListener>,
        proxies: Vec<TcpListener>,
        tls: Option<Arc<ServerConfig>>,
        limits: &HttpLimits,
        stop: &CancellationToken,
    ) -> Self {
        let ingress = ingress.map(|listener| {
            let ingress = Arc::clone(&parts.ingress);
            tokio::spawn(serve_ingress(listener, tls, ingress, limits.clone(), stop.clone()))
        });
        let proxies = proxies
            .into_iter()
            .zip(&parts.proxies)
            .map(|(listener, proxy)| {
                let proxy = Arc::clone(proxy);
                tokio::spawn(serve_proxy(listener, proxy, limits.clone(), stop.clone()))
            })
            .collect();
        Self { ingress, proxies }
    }

    /// Waits until the accepted requests are answered or `drain` is over.
    pub(super) async fn drained(self) -> anyhow::Result<()> {
        if let Some(task) = self.ingress
            && let Drained::Cut { connections } = task.await.context("the public side panicked")?
        {
            tracing::warn!(
                connections,
                "closed {connections} connections that were still busy at the end of `drain`"
            );
        }
        for task in self.proxies {
            if let Drained::Cut { connections } = task.await.context("a proxy panicked")? {
                tracing::warn!(
                    connections,
                    "closed {connections} connections to a proxy that were still busy at the end of `drain`"
                );
            }
        }
        Ok(())
    }
}
