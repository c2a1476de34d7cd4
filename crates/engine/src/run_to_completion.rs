//! Runs work to its end even if its caller is dropped. hyper drops an answer's future when the peer
//! hangs up. A call to the store must still be counted and logged.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

/// Tasks that continue after their callers were dropped.
#[derive(Debug, Clone)]
pub(crate) struct BackgroundTasks(Arc<(TaskTracker, Handle)>);

impl BackgroundTasks {
    /// Runs the tasks on the current runtime.
    pub(crate) fn here() -> Self {
        Self(Arc::new((TaskTracker::new(), Handle::current())))
    }

    /// Runs `work` in the caller's task. If the caller is dropped halfway, `work` moves to a task
    /// of its own. The ordinary case therefore costs one allocation and no task.
    pub(crate) fn run_to_completion<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> RunToCompletion<T> {
        RunToCompletion { work: Some(Box::pin(work)), afterwards: self.clone() }
    }

    /// Runs `work` in a task of its own.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let (tasks, runtime) = &*self.0;
        tasks.spawn_on(work, runtime);
    }

    /// Waits for all moved work. No work may be started after this call.
    pub(crate) async fn finish(&self) {
        self.0.0.close();
        self.0.0.wait().await;
    }
}

/// See [`BackgroundTasks::run_to_completion`].
pub(crate) struct RunToCompletion<T: Send + 'static> {
    work: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    afterwards: BackgroundTasks,
}

impl<T: Send + 'static> Future for RunToCompletion<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let work = self.work.as_mut().expect("not polled again after it completed");
        let polled = work.as_mut().poll(cx);
        if polled.is_ready() {
            self.work = None;
        }
        polled
    }
}

impl<T: Send + 'static> Drop for RunToCompletion<T> {
    fn drop(&mut self) {
        // Work that has just panicked cannot be continued.
        if let Some(work) = self.work.take()
            && !std::thread::panicking()
        {
            let (tasks, runtime) = &*self.afterwards.0;
            tasks.spawn_on(
                async move {
                    work.await;
                },
                runtime,
            );
        }
    }
}
