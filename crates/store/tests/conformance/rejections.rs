//! The last rejections of each source.

use hapax_core::store::{REJECTIONS_KEPT, Rejection, RejectionRecords};
use hapax_core::{SourceName, Timestamp};
use std::sync::Arc;
use uuid::Uuid;

use crate::harness::after;

fn rejection(source: &str, at: Timestamp, claimed_id: Option<&str>) -> Rejection {
    Rejection {
        source: SourceName::new(source),
        at,
        request_id: Uuid::now_v7(),
        remote: Some("192.0.2.7".parse().expect("an address")),
        reason: "signature".to_owned(),
        detail: Some("no secret\0fits \u{202e}<b>".to_owned()),
        claimed_id: claimed_id.map(str::to_owned),
    }
}

pub(crate) async fn the_newest_rejections_of_each_source_are_kept<S: RejectionRecords>(
    store: Arc<S>,
) {
    // A flood at one source must not push out what another source shows, nor grow the table. A sender's text
    // comes back as it was, NUL and marks included.
    let (shop, mail) = (SourceName::new("shop"), SourceName::new("mail"));
    assert_eq!(store.rejections(&shop).await.expect("reads"), []);
    let quiet = rejection("mail", after(0), Some("evt_\0\u{202e}1"));
    store.record_rejections(vec![quiet.clone()]).await.expect("records");
    let flood: Vec<_> = (0..350).map(|n| rejection("shop", after(n), None)).collect();
    for part in flood.chunks(120) {
        store.record_rejections(part.to_vec()).await.expect("records");
    }
    // The same ones again, as after a lost answer.
    store.record_rejections(flood[349..].to_vec()).await.expect("records");
    let newest: Vec<_> = flood.iter().rev().take(REJECTIONS_KEPT).cloned().collect();
    let kept = store.rejections(&shop).await.expect("reads");
    assert_eq!(kept.len(), REJECTIONS_KEPT);
    assert_eq!(kept, newest);
    assert_eq!(store.rejections(&mail).await.expect("reads"), [quiet]);
}
