//! Pages that were rendered within the last second: many open tabs cost one rendering.
//!
//! A rendering is shared only by requests for the same URL, from callers with the same name and the same
//! rights. Every request is authorized before. An operator's action on this node ends all sharing, so the
//! page after an action shows its result. Confirmation pages are never shared: each of their forms has its
//! own plan.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hapax_core::Timestamp;
use hapax_engine::Now;
use http_body_util::BodyExt as _;
use tokio::sync::Mutex as AsyncMutex;

use super::super::auth::{Caller, CallerView};

/// How long a rendering is shared. A tab asks again after 2 seconds at the earliest.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// The most renderings that are kept. Operators view a few pages at a time.
const PAGES_MAX: usize = 64;

/// The longest page that is kept. With [`PAGES_MAX`] this bounds the memory to 16 MiB.
const PAGE_BYTES_MAX: u64 = 256 << 10;

/// The renderings that requests may share.
pub(crate) struct SharedPages {
    now: Now,
    pages: Mutex<HashMap<PageKey, Arc<AsyncMutex<Option<Rendering>>>>>,
    /// How many actions of operators have ended.
    actions: AtomicU64,
}

#[derive(PartialEq, Eq, Hash)]
struct PageKey {
    url: String,
    reader: CallerView,
}

/// A time, and how many actions of operators had ended by then.
#[derive(Clone, Copy)]
struct RenderedAt {
    now: Timestamp,
    actions: u64,
}

struct Rendering {
    began: RenderedAt,
    headers: HeaderMap,
    html: Bytes,
}

impl SharedPages {
    /// No renderings yet.
    pub(crate) fn new(now: Now) -> Self {
        Self { now, pages: Mutex::default(), actions: AtomicU64::new(0) }
    }

    /// Ends all sharing: the next request for each page renders it.
    pub(in crate::admin) fn end(&self) {
        self.actions.fetch_add(1, Ordering::AcqRel);
    }

    /// The current time and the number of ended actions, which decide whether a rendering is current.
    fn moment(&self) -> RenderedAt {
        RenderedAt { now: (self.now)(), actions: self.actions.load(Ordering::Acquire) }
    }

    /// The slot for the rendering of this page; `None` if too many pages are in use.
    fn place(&self, key: PageKey) -> Option<Arc<AsyncMutex<Option<Rendering>>>> {
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        if pages.len() >= PAGES_MAX && !pages.contains_key(&key) {
            let moment = self.moment();
            // A page that is locked is being rendered.
            pages.retain(|_, page| match page.try_lock() {
                Ok(page) => page.as_ref().is_some_and(|page| page.is_current(moment)),
                Err(_) => true,
            });
        }
        let is_full = pages.len() >= PAGES_MAX;
        match pages.entry(key) {
            Entry::Occupied(page) => Some(Arc::clone(page.get())),
            Entry::Vacant(_) if is_full => None,
            Entry::Vacant(page) => Some(Arc::clone(page.insert(Arc::default()))),
        }
    }
}

impl Rendering {
    fn is_current(&self, moment: RenderedAt) -> bool {
        // If the clock was set back, the age is unknown.
        let age = Duration::try_from(moment.now.duration_since(self.began.now));
        self.began.actions == moment.actions && age.is_ok_and(|age| age < SHARED_FOR)
    }

    /// Answers with the page, or with a 304 if the browser has it already.
    fn answer(&self, known: Option<&HeaderValue>) -> Response {
        let is_known = known.is_some() && known == self.headers.get(header::ETAG);
        let mut response = match is_known {
            true => StatusCode::NOT_MODIFIED.into_response(),
            false => Body::from(self.html.clone()).into_response(),
        };
        *response.headers_mut() = self.headers.clone();
        response
    }
}

/// Middleware for read-only pages: answers with a rendering of the last second, if there is one.
pub(in crate::admin) async fn share(
    State(shared): State<Arc<SharedPages>>,
    mut request: Request,
    next: Next,
) -> Response {
    let reader = request.extensions().get::<Caller>().map(Caller::view);
    let place = reader
        .filter(|_| request.method() == Method::GET)
        .and_then(|reader| shared.place(PageKey { url: request.uri().to_string(), reader }));
    let Some(place) = place else { return next.run(request).await };
    // Further requests for the page wait for this rendering instead of starting their own.
    let mut page = place.lock().await;
    let known = request.headers_mut().remove(header::IF_NONE_MATCH);
    let began = shared.moment();
    if let Some(page) = page.as_ref().filter(|page| page.is_current(began)) {
        return page.answer(known.as_ref());
    }
    *page = None;
    let response = next.run(request).await;
    let is_short = response.body().size_hint().exact().is_some_and(|size| size <= PAGE_BYTES_MAX);
    if response.status() != StatusCode::OK || !is_short {
        return response;
    }
    let (parts, body) = response.into_parts();
    match body.collect().await {
        Ok(html) => {
            let html = html.to_bytes();
            let rendering = Rendering { began, headers: parts.headers, html };
            page.insert(rendering).answer(known.as_ref())
        }
        Err(error) => {
            tracing::error!(%error, "reading a rendered page: {error}");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
