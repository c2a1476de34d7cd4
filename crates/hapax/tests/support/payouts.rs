//! The payouts that the examples charge a fee for. Each payout is 10,000, so each fee is 50.

use std::ops::Range;

use serde_json::json;

use super::Sender;
use super::load::Load;

/// A load of these payouts, each `copies` times on as many connections.
pub(crate) fn payouts(secret: &str, payouts: Range<usize>, copies: usize) -> Load {
    let payout = |n: usize| {
        let body = json!({
            "id": format!("evt_{n}"), "object": "event", "type": "payout.paid",
            "data": { "object": { "id": format!("po_{n}"), "amount": 10_000 } },
        });
        Sender::stripe(secret).request(body.to_string()).bytes()
    };
    let requests = payouts.flat_map(|n| std::iter::repeat_n(payout(n), copies)).collect();
    Load::new(copies, requests)
}
