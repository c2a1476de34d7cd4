//! Signed requests, created so cheaply that this does not affect the measurement: one request is
//! laid out once, and each event only replaces its id, its timestamp and its signature.

use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use aws_lc_rs::hmac;

/// The secret of all servers.
pub(crate) const SECRET: &str = "whsec_benchmark_0123456789abcdefghijklmnop";

/// Stripe's events are of about this size.
const BODY_BYTES: usize = 1024;

const ID_DIGITS: usize = 20;
const TIME_DIGITS: usize = 10;
const SIGNATURE_DIGITS: usize = 64;

/// Creates the events.
pub(crate) struct Events {
    key: hmac::Key,
    layout: Layout,
    next: u64,
    next_again: u64,
    copies_of: u64,
    next_copy: usize,
    copies: Vec<Vec<u8>>,
}

/// A request, and the positions of its variable parts.
#[derive(Clone)]
struct Layout {
    bytes: Vec<u8>,
    time: Range<usize>,
    signature: Range<usize>,
    body: Range<usize>,
    id: Range<usize>,
    /// The event's Idempotency-Key, if it has one.
    key: Option<Range<usize>>,
}

impl Events {
    /// Events of which the first `copies_of` are repeated.
    pub(crate) fn new(copies_of: u64) -> Self {
        Self::laid_out(Layout::new(""), copies_of)
    }

    /// Events of which the first `copies_of` are repeated, each with its own Idempotency-Key.
    pub(crate) fn with_keys(copies_of: u64) -> Self {
        let header = format!("idempotency-key: key_{}\r\n", "0".repeat(ID_DIGITS));
        Self::laid_out(Layout::new(&header), copies_of)
    }

    fn laid_out(layout: Layout, copies_of: u64) -> Self {
        Self {
            key: hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes()),
            layout,
            next: 0,
            next_again: 0,
            copies_of: copies_of.max(1),
            next_copy: 0,
            copies: Vec::new(),
        }
    }

    /// Further events, numbered from the end of these.
    pub(crate) fn further(&self) -> Self {
        Self { next: self.next, ..Self::laid_out(self.layout.clone(), 1) }
    }

    /// A request of the form that [`Events::renew`] fills in.
    pub(crate) fn blank(&self) -> Vec<u8> {
        self.layout.bytes.clone()
    }

    /// Turns `request` into a new event.
    pub(crate) fn renew(&mut self, request: &mut [u8]) {
        let n = self.next;
        self.next += 1;
        self.sign(request, n, unix_seconds());
    }

    /// The number of events so far.
    pub(crate) fn made(&self) -> u64 {
        self.next
    }

    /// Turns `request` into a copy of an event that was sent before. The events are repeated in
    /// turn.
    pub(crate) fn again(&mut self, request: &mut [u8]) {
        let n = self.next_again;
        self.next_again = (n + 1) % self.next.max(1);
        self.sign(request, n, unix_seconds());
    }

    /// Makes [`Events::again`] start with the first event.
    pub(crate) fn begin_again(&mut self) {
        self.next_again = 0;
    }

    /// Signs the events that are going to be repeated again: a run is longer than the replay
    /// window, but a slice is shorter.
    pub(crate) fn prepare_copies(&mut self) {
        let now = unix_seconds();
        let copies = (0..self.copies_of).map(|n| {
            let mut request = self.blank();
            self.sign(&mut request, n, now);
            request
        });
        self.copies = copies.collect();
    }

    /// The next request to repeat.
    pub(crate) fn copy(&mut self) -> &[u8] {
        self.next_copy = (self.next_copy + 1) % self.copies.len();
        &self.copies[self.next_copy]
    }

    fn sign(&self, request: &mut [u8], n: u64, now: u64) {
        let layout = &self.layout;
        write_digits(&mut request[layout.id.clone()], n);
        write_digits(&mut request[layout.time.clone()], now);
        if let Some(key) = &layout.key {
            write_digits(&mut request[key.clone()], n);
        }
        let mut signing = hmac::Context::with_key(&self.key);
        signing.update(&request[layout.time.clone()]);
        signing.update(b".");
        signing.update(&request[layout.body.clone()]);
        let signature = signing.sign();
        hex::encode_to_slice(signature.as_ref(), &mut request[layout.signature.clone()])
            .expect("SHA-256 has 64 hex digits");
    }
}

impl Layout {
    /// `header`: one more header, with its line end.
    fn new(header: &str) -> Self {
        let body = body();
        let head = format!(
            "POST /webhooks/stripe HTTP/1.1\r\n\
             host: hooks.example.com\r\n\
             user-agent: Stripe/1.0 (+https://stripe.com/docs/webhooks)\r\n\
             accept: */*; q=0.5, application/xml\r\n\
             cache-control: no-cache\r\n\
             content-type: application/json; charset=utf-8\r\n\
             content-length: {}\r\n\
             {header}stripe-signature: t={},v1={}\r\n\r\n",
            body.len(),
            "0".repeat(TIME_DIGITS),
            "0".repeat(SIGNATURE_DIGITS),
        );
        let time = after(&head, "stripe-signature: t=");
        let signature = after(&head, ",v1=");
        let id = head.len() + after(&body, "\"evt_");
        let key = (!header.is_empty()).then(|| after(&head, "idempotency-key: key_"));
        Self {
            key: key.map(|key| key..key + ID_DIGITS),
            time: time..time + TIME_DIGITS,
            signature: signature..signature + SIGNATURE_DIGITS,
            body: head.len()..head.len() + body.len(),
            id: id..id + ID_DIGITS,
            bytes: [head, body].concat().into_bytes(),
        }
    }
}

fn body() -> String {
    let open = format!(
        r#"{{"id":"evt_{}","object":"event","api_version":"2024-06-20","created":1790000000,"type":"payout.paid","livemode":true,"pending_webhooks":1,"request":{{"id":null,"idempotency_key":null}},"data":{{"object":{{"id":"po_1OyQm2L","object":"payout","amount":1100,"currency":"eur","arrival_date":1790000000,"status":"paid","method":"standard","description":""#,
        "0".repeat(ID_DIGITS)
    );
    let close = r#""}}}"#;
    let filler = BODY_BYTES.saturating_sub(open.len() + close.len());
    [open, "payout ".chars().cycle().take(filler).collect(), close.to_owned()].concat()
}

pub(crate) fn after(text: &str, mark: &str) -> usize {
    text.find(mark).expect("the mark is part of the text") + mark.len()
}

pub(crate) fn write_digits(place: &mut [u8], mut number: u64) {
    for digit in place.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
