//! The tasks that end after the last request was answered: workers, sender, janitor and recorders.

use std::sync::Arc;

use anyhow::Context as _;
use hapax_core::store::Completion;
use hapax_engine::{SearchIndexer, run_plans};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::ServerStore;
use super::parts::Parts;
use crate::config::{Role, Settings};
use crate::endpoint_recorder;
use crate::verifier_names;

/// The running tasks, in the order in which their ends are awaited.
pub(super) struct Background {
    tasks: Vec<(JoinHandle<()>, &'static str)>,
}

impl Background {
    /// Starts the tasks of this process's roles.
    pub(super) fn start<S: ServerStore>(
        parts: &Parts<S>,
        settings: &Settings,
        stop: &CancellationToken,
    ) -> Self {
        let (works, sends) = (settings.roles.has(Role::Worker), settings.roles.has(Role::Sender));
        let drain = settings.drain;
        let store = || Arc::clone(&parts.store);
        let stop = || stop.clone();
        let mut background = Self { tasks: Vec::new() };
        if works {
            background.add("the workers panicked", Arc::clone(&parts.workers).run(drain, stop()));
        }
        if sends {
            background.add("the sender panicked", Arc::clone(&parts.sender).run(drain, stop()));
        }
        if works || sends {
            // Only workers have the handlers that events need.
            let jobs_for = works.then(|| parts.jobs_for());
            let plans = run_plans(store(), jobs_for, Arc::clone(&parts.now), stop());
            background.add("the runner of plans panicked", plans);
        }
        if works {
            let (janitor, stopped) = (Arc::clone(&parts.janitor), stop());
            background.add("the janitor panicked", async move { janitor.run(stopped).await });
            let indexer = SearchIndexer::new(store(), Arc::clone(&parts.search_fields));
            let stopped = stop();
            background
                .add("the search indexer panicked", async move { indexer.run(stopped).await });
        }
        let (watch, to, stopped) = (Arc::clone(&parts.watch), store(), stop());
        background.add("the alert monitor panicked", async move { watch.run(to, stopped).await });
        let (traffic, to, stopped) = (Arc::clone(&parts.traffic), store(), stop());
        let workers = Arc::clone(&parts.workers);
        let completed = move |it: &Completion| {
            workers.count_tried(&it.source, &it.job, it.began, it.ended);
        };
        background.add("the recorder of traffic panicked", async move {
            traffic.run(to, completed, stopped).await
        });
        if settings.roles.has(Role::Admin) {
            let (traffic, to, stopped) = (Arc::clone(&parts.traffic), store(), stop());
            background.add("reading the figures of the last week panicked", async move {
                traffic.keep_week(to, stopped).await
            });
        }
        if sends {
            let (sender, now) = (Arc::clone(&parts.sender), Arc::clone(&parts.now));
            let endpoints = endpoint_recorder::run(store(), parts.node, sender, now, stop());
            background.add("the recorder of endpoints panicked", endpoints);
        }
        let (rejections, to, stopped) = (Arc::clone(&parts.rejections), store(), stop());
        background.add("the recorder of rejections panicked", async move {
            rejections.run(to, stopped).await
        });
        let ingress = Arc::clone(&parts.ingress);
        let verifiers = verifier_names::run(store(), move || ingress.secret_uses(), stop());
        background.add("the recorder of secrets' names panicked", verifiers);
        let (tenants, stopped) = (Arc::clone(&parts.tenants), stop());
        background.add("reading the secrets of tenants panicked", async move {
            tenants.run(stopped).await
        });
        let (resealer, stopped) = (Arc::clone(&parts.resealer), stop());
        background.add("sealing stored values again panicked", async move {
            resealer.run(stopped).await
        });
        background
    }

    /// Starts one more task. If it panics, the server fails with the error `if_it_panics`.
    pub(super) fn add<F>(&mut self, if_it_panics: &'static str, task: F)
    where
        F: Future + Send + 'static,
    {
        let task = tokio::spawn(async move {
            task.await;
        });
        self.tasks.push((task, if_it_panics));
    }

    /// Waits until every task has ended.
    pub(super) async fn ended(self) -> anyhow::Result<()> {
        for (task, if_it_panicked) in self.tasks {
            task.await.context(if_it_panicked)?;
        }
        Ok(())
    }
}
