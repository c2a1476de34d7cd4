//! Sessions of the dashboard, and the audit trail.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::store::{AdminRecords, AuditEntry, AuditFilter, Session};

fn session(number: u8, expires_at: Timestamp) -> Session {
    Session { hash: [number; 32], token: [7; 32], who: format!("ops ({number})"), expires_at }
}

pub(crate) async fn a_session_is_known_until_it_is_ended<S: AdminRecords>(store: Arc<S>) {
    let later =
        Timestamp::now().round(jiff::Unit::Microsecond).unwrap() + Duration::from_secs(3_600);
    let (one, other) = (session(1, later), session(2, later));
    store.open_session(one.clone()).await.expect("opens");
    store.open_session(other.clone()).await.expect("opens");
    assert_eq!(store.session([1; 32]).await.expect("reads"), Some(one));
    assert_eq!(store.session([3; 32]).await.expect("reads"), None);
    store.end_session([1; 32]).await.expect("ends");
    store.end_session([1; 32]).await.expect("ends twice");
    assert_eq!(store.session([1; 32]).await.expect("reads"), None);
    assert_eq!(store.session([2; 32]).await.expect("reads"), Some(other));
}

pub(crate) async fn sessions_that_have_ended_are_deleted_with_the_next_one<S: AdminRecords>(
    store: Arc<S>,
) {
    // Sessions that were never deleted would fill the table with every login.
    let now = Timestamp::now();
    store.open_session(session(1, now - Duration::from_secs(60))).await.expect("opens");
    store.open_session(session(2, now + Duration::from_secs(60))).await.expect("opens");
    assert_eq!(store.session([1; 32]).await.expect("reads"), None);
    assert!(store.session([2; 32]).await.expect("reads").is_some());
}

pub(crate) async fn the_audit_trail_is_read_from_new_to_old_in_pages<S: AdminRecords>(
    store: Arc<S>,
) {
    let at = Timestamp::now().round(jiff::Unit::Microsecond).unwrap();
    let entry = |number: usize| AuditEntry {
        at,
        who: if number.is_multiple_of(3) { "anna" } else { "ops" }.to_owned(),
        action: "POST /api/v1/events/{id}/replay".to_owned(),
        subject: format!("/api/v1/events/{number}/replay"),
        status: 200,
    };
    store.audit((0..4).map(entry).collect()).await.expect("writes");
    store.audit((4..7).map(entry).collect()).await.expect("writes");
    let read = async |who: Option<&str>| {
        let (mut read, mut before) = (Vec::new(), None);
        loop {
            let filter = AuditFilter { who: who.map(str::to_owned), before, limit: 2 };
            let page = store.audited(filter).await.expect("reads");
            assert!(page.items.len() <= 2);
            read.extend(page.items);
            before = page.next;
            if before.is_none() {
                return read;
            }
        }
    };
    assert_eq!(read(None).await, [6, 5, 4, 3, 2, 1, 0].map(entry));
    assert_eq!(read(Some("anna")).await, [6, 3, 0].map(entry));
    assert_eq!(read(Some("nix")).await, []);
}
