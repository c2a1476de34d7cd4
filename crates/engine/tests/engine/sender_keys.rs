//! Keys that are fetched from senders: PayPal's certificates and Plaid's keys, through the real ingress, from a
//! server with TLS that stands in for the sender. No forged name may cost more than its bound, and no failure may
//! lose an event.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _, RSA_PKCS1_SHA256,
};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_core::store::{EventFilter, Inspect as _};
use hapax_core::{Source, Timestamp};
use hapax_engine::{
    DnsResolver, ENDPOINT_PORTS, EndpointClient, GuardRules, HttpLimits, Ingress, RouteSpec,
    Routes, RoutesSpec, SenderKeys, serve_ingress,
};
use hapax_store::MemoryStore;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, PKCS_RSA_SHA256,
};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_util::sync::CancellationToken;

use crate::support::{BufferedAnswer, Wire, within};

const WEBHOOK_ID: &str = "WH-TEST-1";
const CERTS: &str = "https://api.paypal.com/v1/notifications/certs/";
const PLAID_SECRET: &str = "hunter2-of-plaid";
const HOUR: i64 = 3_600;

fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// The server's answers to a path, or to the id of a key in a body.
#[derive(Default)]
struct Answers {
    by_name: Mutex<HashMap<String, (u16, String)>>,
    /// Every request that arrived: its first line and its body.
    requests: Mutex<Vec<(String, String)>>,
}

/// A sender's server for keys.
struct KeyServer {
    port: u16,
    root: CertificateDer<'static>,
    answers: Arc<Answers>,
    /// How many requests arrived.
    arrived: watch::Receiver<usize>,
    /// Answers wait until this is true.
    opens: watch::Sender<bool>,
    _serving: JoinSet<()>,
}

impl KeyServer {
    async fn start() -> Self {
        let (authority, key) = (authority("Web authority"), KeyPair::generate().unwrap());
        let params = CertificateParams::new(["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap().der().clone();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let answers = Arc::<Answers>::default();
        let (arrives, arrived) = watch::channel(0);
        let (opens, open) = watch::channel(true);
        let mut serving = JoinSet::new();
        let kept = Arc::clone(&answers);
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            let arrives = Arc::new(arrives);
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, kept, mut open) = (acceptor.clone(), kept.clone(), open.clone());
                let arrives = Arc::clone(&arrives);
                connections.spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    while let Some((line, body)) = read_request(&mut stream).await {
                        kept.requests.lock().unwrap().push((line.clone(), body.clone()));
                        arrives.send_modify(|count| *count += 1);
                        if open.wait_for(|open| *open).await.is_err() {
                            return;
                        }
                        let (status, text) = kept.answer(&line, &body);
                        let answer = format!(
                            "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{text}",
                            text.len()
                        );
                        if stream.write_all(answer.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { port, root: authority.der().clone(), answers, arrived, opens, _serving: serving }
    }

    /// Sets the answer for the name of a certificate or a key.
    fn set(&self, name: &str, status: u16, text: impl Into<String>) {
        self.answers.by_name.lock().unwrap().insert(name.to_owned(), (status, text.into()));
    }

    fn fetches(&self) -> usize {
        self.answers.requests.lock().unwrap().len()
    }

    async fn wait_for_fetches(&mut self, count: usize) {
        within(self.arrived.wait_for(|arrived| *arrived >= count)).await.unwrap();
    }

    /// Fetches from this server instead of the sender's.
    fn keys(&self) -> SenderKeys {
        let loopback = vec!["127.0.0.0/8".parse().unwrap()];
        let rules = GuardRules::new(loopback, ENDPOINT_PORTS.to_vec(), None);
        let roots = std::slice::from_ref(&self.root);
        let client = EndpointClient::with(rules, Arc::new(DnsResolver::system()), roots).unwrap();
        let here = format!("https://localhost:{}", self.port);
        SenderKeys::at(client, move |url| {
            url.replace("https://api.paypal.com", &here)
                .replace("https://production.plaid.com", &here)
        })
    }
}

impl Answers {
    fn answer(&self, line: &str, body: &str) -> (u16, String) {
        let path = line.split(' ').nth(1).unwrap_or_default();
        let named = serde_json::from_str::<Value>(body)
            .ok()
            .and_then(|body| body["key_id"].as_str().map(str::to_owned))
            .unwrap_or_else(|| path.rsplit('/').next().unwrap_or_default().to_owned());
        self.by_name.lock().unwrap().get(&named).cloned().unwrap_or((404, "unknown".to_owned()))
    }
}

async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> Option<(String, String)> {
    let mut read = Vec::new();
    loop {
        if let Some(head) = read.windows(4).position(|four| four == b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&read[..head]).to_string();
            let length = text.to_ascii_lowercase();
            let length = length.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.map_or(0, |length| length.parse().unwrap());
            if read.len() >= head + 4 + length {
                let body = String::from_utf8(read[head + 4..].to_vec()).unwrap();
                return Some((text.lines().next()?.to_owned(), body));
            }
        }
        if stream.read_buf(&mut read).await.ok()? == 0 {
            return None;
        }
    }
}

/// A signer with a certificate of PayPal, or with one that differs in its name or its issuer.
struct Signer {
    id: &'static str,
    pem: String,
    key: aws_lc_rs::rsa::KeyPair,
}

impl Signer {
    fn new(id: &'static str, issuer: &CertifiedIssuer<'static, KeyPair>, name: &str) -> Self {
        let key = aws_lc_rs::rsa::KeyPair::generate(KeySize::Rsa2048).unwrap();
        let der = aws_lc_rs::encoding::AsDer::<aws_lc_rs::encoding::Pkcs8V1Der<'_>>::as_der(&key);
        let der = PrivateKeyDer::try_from(der.unwrap().as_ref().to_vec()).unwrap();
        let pair = KeyPair::from_der_and_sign_algo(&der, &PKCS_RSA_SHA256).unwrap();
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let pem = params.signed_by(&pair, issuer).unwrap().pem();
        Self { id, pem, key }
    }

    fn url(&self) -> String {
        format!("{CERTS}{}", self.id)
    }

    /// A request of PayPal at `second`, whose certificate is said to be at `url`.
    fn request(&self, event: &str, second: i64, url: &str) -> String {
        let body = json!({"id": event, "event_type": "PAYMENT.SALE.COMPLETED"}).to_string();
        let time = Timestamp::from_second(second).unwrap().to_string();
        let content = format!("T-{event}|{time}|{WEBHOOK_ID}|{}", crc32(body.as_bytes()));
        let mut signature = vec![0; self.key.public_modulus_len()];
        let random = SystemRandom::new();
        self.key.sign(&RSA_PKCS1_SHA256, &random, content.as_bytes(), &mut signature).unwrap();
        format!(
            "POST /webhooks/paypal HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
             paypal-transmission-id: T-{event}\r\npaypal-transmission-time: {time}\r\n\
             paypal-transmission-sig: {}\r\npaypal-cert-url: {url}\r\n\
             paypal-auth-algo: SHA256withRSA\r\ncontent-length: {}\r\n\r\n{body}",
            STANDARD.encode(signature),
            body.len()
        )
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 { 0xedb8_8320 ^ (crc >> 1) } else { crc >> 1 }
        })
    })
}

/// A server with the sources `paypal`, `plaid` and `stripe`.
struct Receiver {
    address: SocketAddr,
    clock: Arc<AtomicI64>,
    store: Arc<MemoryStore>,
    stop: CancellationToken,
    _served: JoinSet<()>,
}

impl Receiver {
    async fn start(keys: SenderKeys, paypal_roots: &str) -> Self {
        let text = |secret: &str| vec![ActiveSecret::forever(Secret::new(secret))];
        let mut paypal = SourceSpec::new("paypal", "paypal", text(WEBHOOK_ID));
        paypal.params.insert("ca_pem".to_owned(), paypal_roots.to_owned());
        let mut plaid = SourceSpec::new("plaid", "plaid", text(PLAID_SECRET));
        plaid.params.insert("client_id".to_owned(), "client-1".to_owned());
        let stripe = SourceSpec::new("stripe", "stripe", text(STRIPE_SECRET));
        let sources = [paypal, plaid, stripe].map(|spec| Arc::new(Source::build(spec).unwrap()));
        let routes = RoutesSpec::new(sources.into_iter().map(RouteSpec::new).collect());
        let routes = Routes::build(routes).unwrap();
        let clock = Arc::new(AtomicI64::new(1_700_000_000));
        let now = {
            let clock = Arc::clone(&clock);
            Arc::new(move || Timestamp::from_second(clock.load(Ordering::SeqCst)).unwrap())
        };
        let store = Arc::new(MemoryStore::with_clock(now.clone()));
        let ingress = Ingress::new(Arc::clone(&store), routes, now).with_sender_keys(keys);
        let ingress = Arc::new(ingress);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let mut served = JoinSet::new();
        let serving = serve_ingress(listener, None, ingress, HttpLimits::default(), stop.clone());
        served.spawn(async move {
            serving.await;
        });
        Self { address, clock, store, stop, _served: served }
    }

    fn now(&self) -> i64 {
        self.clock.load(Ordering::SeqCst)
    }

    fn advance(&self, seconds: i64) {
        self.clock.fetch_add(seconds, Ordering::SeqCst);
    }

    async fn send(&self, request: &str) -> BufferedAnswer {
        let mut wire = Wire::connect(self.address).await;
        wire.write(request).await;
        wire.answer().await
    }

    /// Sends an event of PayPal as this signer does, and returns the status.
    async fn paypal(&self, signer: &Signer, event: &str) -> u16 {
        self.send(&signer.request(event, self.now(), &signer.url())).await.status
    }

    /// The event ids that are stored.
    async fn stored(&self) -> usize {
        let every = EventFilter { limit: usize::MAX, ..EventFilter::default() };
        self.store.events(every).await.unwrap().items.len()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

const STRIPE_SECRET: &str = "whsec_another";

fn stripe_request(second: i64) -> String {
    let body = json!({"id": "evt_1", "type": "payout.paid"}).to_string();
    let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, STRIPE_SECRET.as_bytes());
    let tag = aws_lc_rs::hmac::sign(&key, format!("{second}.{body}").as_bytes());
    format!(
        "POST /webhooks/stripe HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
         stripe-signature: t={second},v1={}\r\ncontent-length: {}\r\n\r\n{body}",
        hex::encode(tag),
        body.len()
    )
}

const PAYPAL_NAME: &str = "messageverificationcerts.paypal.com";

/// PayPal with one certificate, its server, and a receiver.
async fn stage() -> (CertifiedIssuer<'static, KeyPair>, Signer, KeyServer, Receiver) {
    let issuer = authority("Certificates of PayPal");
    let signer = Signer::new("CERT-1", &issuer, PAYPAL_NAME);
    let server = KeyServer::start().await;
    server.set("CERT-1", 200, &*signer.pem);
    let receiver = Receiver::start(server.keys(), &issuer.pem()).await;
    (issuer, signer, server, receiver)
}

/// Twenty events arrive before the certificate is known: with a fetch for each event, a flood of
/// events would cause a flood of fetches.
#[tokio::test]
async fn a_certificate_is_fetched_once_for_all_requests_that_need_it() {
    let (_, signer, mut server, receiver) = stage().await;
    server.opens.send_replace(false);
    let mut wires = Vec::new();
    for n in 0..20 {
        let mut wire = Wire::connect(receiver.address).await;
        wire.write(signer.request(&format!("e{n}"), receiver.now(), &signer.url())).await;
        wires.push(wire);
    }
    server.wait_for_fetches(1).await;
    server.opens.send_replace(true);
    for wire in &mut wires {
        assert_eq!(wire.answer().await.status, 200);
    }
    assert_eq!((server.fetches(), receiver.stored().await), (1, 20));
    let (line, _) = server.answers.requests.lock().unwrap()[0].clone();
    assert_eq!(line, "GET /v1/notifications/certs/CERT-1 HTTP/1.1");
}

/// The sender changes its certificate; both are in use for a while.
#[tokio::test]
async fn a_new_certificate_is_fetched_and_the_old_one_stays_known() {
    let (issuer, first, server, receiver) = stage().await;
    assert_eq!(receiver.paypal(&first, "e1").await, 200);
    let second = Signer::new("CERT-2", &issuer, PAYPAL_NAME);
    server.set("CERT-2", 200, &*second.pem);
    assert_eq!(receiver.paypal(&second, "e2").await, 200);
    server.set("CERT-1", 500, "");
    assert_eq!(receiver.paypal(&first, "e3").await, 200);
    assert_eq!(server.fetches(), 2);
    // A signature of one certificate under the name of the other is forged.
    let forged = first.request("e4", receiver.now(), &second.url());
    assert_eq!(receiver.send(&forged).await.status, 401);
    assert_eq!(receiver.stored().await, 3);
}

/// A certificate that its sender withdrew must not be trusted for ever. Fetching a known certificate again
/// must delay no event.
#[tokio::test]
async fn a_known_certificate_is_fetched_again_beside_its_use_and_forgotten_after_a_day() {
    let (_, signer, mut server, receiver) = stage().await;
    assert_eq!(receiver.paypal(&signer, "e1").await, 200);
    receiver.advance(11 * HOUR);
    assert_eq!(receiver.paypal(&signer, "e2").await, 200);
    assert_eq!(server.fetches(), 1);
    // The server hangs and then fails. The event must be answered before the fetch ends.
    server.opens.send_replace(false);
    server.set("CERT-1", 500, "");
    receiver.advance(2 * HOUR);
    assert_eq!(receiver.paypal(&signer, "e3").await, 200);
    server.wait_for_fetches(2).await;
    assert_eq!(receiver.paypal(&signer, "e4").await, 200);
    server.opens.send_replace(true);
    // After a whole day the key is no longer known.
    receiver.advance(12 * HOUR);
    let late = receiver.send(&signer.request("e5", receiver.now(), &signer.url())).await;
    assert_eq!((late.status, receiver.stored().await), (503, 4), "{late:?}");
    assert!(late.header("retry-after").is_some());
    server.set("CERT-1", 200, &*signer.pem);
    receiver.advance(31);
    assert_eq!(receiver.paypal(&signer, "e5").await, 200);
}

/// The address of the certificate belongs to the attacker. With a certificate from there, anything
/// could be proven.
#[tokio::test]
async fn a_certificate_at_another_address_is_refused_and_never_fetched() {
    let (_, signer, server, receiver) = stage().await;
    for url in [
        format!("https://localhost:{}/v1/notifications/certs/CERT-1", server.port),
        "https://api.paypal.com.evil.example/v1/notifications/certs/CERT-1".to_owned(),
        "http://api.paypal.com/v1/notifications/certs/CERT-1".to_owned(),
        "https://api.paypal.com/v1/notifications/certs/..%2fCERT-1".to_owned(),
        format!("{CERTS}CERT-1\r\npaypal-cert-url: {CERTS}CERT-2"),
    ] {
        let answer = receiver.send(&signer.request("e1", receiver.now(), &url)).await;
        assert_eq!(answer.status, 401, "{url}");
    }
    assert_eq!((server.fetches(), receiver.stored().await), (0, 0));
}

/// PayPal's server is down, answers nonsense, or presents a certificate that cannot be trusted: the sender must
/// retry, since the event may be real. The retries must not multiply the fetches.
#[tokio::test]
async fn a_certificate_that_cannot_be_had_is_a_503_and_is_not_fetched_by_every_retry() {
    let (issuer, signer, server, receiver) = stage().await;
    let stranger = authority("Another authority");
    let untrusted = Signer::new("CERT-1", &stranger, PAYPAL_NAME);
    let misnamed = Signer::new("CERT-1", &issuer, "messageverificationcerts.example.com");
    let large = "x".repeat(65 << 10);
    for (place, (status, answer)) in [
        (500, ""),
        (404, "no such certificate"),
        (302, &*signer.pem),
        (200, "<html>"),
        (200, &*large),
        (200, &*untrusted.pem),
        (200, &*misnamed.pem),
    ]
    .into_iter()
    .enumerate()
    {
        server.set("CERT-1", status, answer);
        for _ in 0..3 {
            assert_eq!(receiver.paypal(&signer, "e1").await, 503, "{place}");
        }
        assert_eq!(server.fetches(), place + 1);
        receiver.advance(31);
    }
    assert_eq!(receiver.stored().await, 0);
    server.set("CERT-1", 200, &*signer.pem);
    assert_eq!(receiver.paypal(&signer, "e1").await, 200);
}

/// Each request names another certificate. One address must not cause an unlimited number of fetches, and must not
/// block requests of the real sender.
#[tokio::test]
async fn forged_names_cost_a_bounded_number_of_fetches_and_known_keys_still_work() {
    let (issuer, signer, server, receiver) = stage().await;
    assert_eq!(receiver.paypal(&signer, "e1").await, 200);
    for n in 0..100 {
        let url = format!("{CERTS}FORGED-{n}");
        let answer = receiver.send(&signer.request("x", receiver.now(), &url)).await;
        assert_eq!(answer.status, 503);
    }
    // Ten fetches in a minute, and the one at the start. On a slow machine, the rate may permit a
    // few more.
    assert!(server.fetches() <= 15, "{}", server.fetches());
    assert_eq!(receiver.paypal(&signer, "e2").await, 200);
    // A new certificate that another address names is fetched.
    let second = Signer::new("CERT-2", &issuer, PAYPAL_NAME);
    server.set("CERT-2", 200, &*second.pem);
    let mut wire = Wire::connect_from([127, 0, 0, 2], receiver.address).await;
    wire.write(second.request("e3", receiver.now(), &second.url())).await;
    assert_eq!(wire.answer().await.status, 200);
}

/// Strangers at many addresses use up all fetches of strangers. Then a proven sender changes its certificate, and
/// a certificate that was known before must be fetched again.
#[tokio::test]
async fn forged_names_from_many_addresses_keep_no_key_from_proven_senders() {
    let (issuer, signer, server, receiver) = stage().await;
    assert_eq!(receiver.paypal(&signer, "e1").await, 200);
    for n in 0_u8..100 {
        let url = format!("{CERTS}FORGED-{n}");
        let mut wire = Wire::connect_from([127, 0, 1, n], receiver.address).await;
        wire.write(signer.request("x", receiver.now(), &url)).await;
        assert_eq!(wire.answer().await.status, 503);
    }
    assert!(server.fetches() >= 60, "{}", server.fetches());
    let second = Signer::new("CERT-2", &issuer, PAYPAL_NAME);
    server.set("CERT-2", 200, &*second.pem);
    assert_eq!(receiver.paypal(&second, "e2").await, 200);
    // A day later, an address that has sent no request before names the known certificate.
    receiver.advance(25 * HOUR);
    let mut wire = Wire::connect_from([127, 0, 0, 2], receiver.address).await;
    wire.write(signer.request("e3", receiver.now(), &signer.url())).await;
    assert_eq!(wire.answer().await.status, 200);
}

/// The key server hangs: requests that need its keys wait, and other requests do not.
#[tokio::test]
async fn a_slow_key_server_delays_no_other_source() {
    let (_, signer, mut server, receiver) = stage().await;
    server.opens.send_replace(false);
    let mut waiting = Vec::new();
    for n in 0..50 {
        let mut wire = Wire::connect(receiver.address).await;
        wire.write(signer.request(&format!("e{n}"), receiver.now(), &signer.url())).await;
        waiting.push(wire);
    }
    server.wait_for_fetches(1).await;
    let answer = receiver.send(&stripe_request(receiver.now())).await;
    assert_eq!((answer.status, receiver.stored().await), (200, 1), "{answer:?}");
    // At the deadline of the fetch the sender is asked to retry.
    for wire in &mut waiting {
        assert_eq!(wire.answer().await.status, 503);
    }
    server.opens.send_replace(true);
    receiver.advance(31);
    assert_eq!(receiver.paypal(&signer, "e0").await, 200);
}

/// The client that caused the fetch hangs up, as senders do at their own timeout.
#[tokio::test]
async fn a_hung_up_client_does_not_stop_the_fetch_for_others() {
    let (_, signer, mut server, receiver) = stage().await;
    server.opens.send_replace(false);
    let mut first = Wire::connect(receiver.address).await;
    first.write(signer.request("e1", receiver.now(), &signer.url())).await;
    server.wait_for_fetches(1).await;
    let mut second = Wire::connect(receiver.address).await;
    second.write(signer.request("e2", receiver.now(), &signer.url())).await;
    drop(first);
    server.opens.send_replace(true);
    assert_eq!(second.answer().await.status, 200);
    assert_eq!(server.fetches(), 1);
}

/// A key of Plaid.
struct PlaidKey {
    kid: &'static str,
    pair: EcdsaKeyPair,
}

impl PlaidKey {
    fn new(kid: &'static str) -> Self {
        Self { kid, pair: EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap() }
    }

    /// The answer of `/webhook_verification_key/get`.
    fn answer(&self, expired_at: Option<i64>) -> String {
        let point = self.pair.public_key().as_ref();
        let coordinate = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let key = json!({
            "alg": "ES256", "crv": "P-256", "kid": self.kid, "kty": "EC", "use": "sig",
            "x": coordinate(&point[1..33]), "y": coordinate(&point[33..65]),
            "created_at": 1_600_000_000, "expired_at": expired_at,
        });
        json!({"key": key, "request_id": "r"}).to_string()
    }

    fn request(&self, item: &str, second: i64) -> String {
        let body = json!({"webhook_type": "ITEM", "webhook_code": "ERROR", "item_id": item});
        let body = body.to_string();
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, body.as_bytes());
        let claims = json!({"iat": second, "request_body_sha256": hex::encode(digest)});
        let head = json!({"alg": "ES256", "kid": self.kid, "typ": "JWT"}).to_string();
        let encoded = |text: String| URL_SAFE_NO_PAD.encode(text);
        let content = format!("{}.{}", encoded(head), encoded(claims.to_string()));
        let signature = self.pair.sign(&SystemRandom::new(), content.as_bytes()).unwrap();
        format!(
            "POST /webhooks/plaid HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
             plaid-verification: {content}.{}\r\ncontent-length: {}\r\n\r\n{body}",
            URL_SAFE_NO_PAD.encode(signature),
            body.len()
        )
    }
}

/// Plaid changes its key, and then says that the old one has expired.
#[tokio::test]
async fn a_key_of_plaid_is_asked_for_by_its_id_and_expires_when_plaid_says_so() {
    let server = KeyServer::start().await;
    let (first, second) = (PlaidKey::new("kid-1"), PlaidKey::new("kid-2"));
    server.set("kid-1", 200, first.answer(None));
    server.set("kid-2", 200, second.answer(None));
    let mut server = server;
    let receiver = Receiver::start(server.keys(), &authority("x").pem()).await;
    let send = |key: &PlaidKey, item: &str| key.request(item, receiver.now());
    for (key, item) in [(&first, "a"), (&second, "b"), (&first, "c")] {
        assert_eq!(receiver.send(&send(key, item)).await.status, 200);
    }
    let asked = server.answers.requests.lock().unwrap().clone();
    assert_eq!(asked.len(), 2);
    assert_eq!(asked[0].0, "POST /webhook_verification_key/get HTTP/1.1");
    let body: Value = serde_json::from_str(&asked[0].1).unwrap();
    let expected = json!({"client_id": "client-1", "secret": PLAID_SECRET, "key_id": "kid-1"});
    assert_eq!(body, expected);
    // The next fetch, which a request causes in the background, reports the end of the first key.
    server.set("kid-1", 200, first.answer(Some(receiver.now() + 13 * HOUR + 60)));
    receiver.advance(13 * HOUR);
    assert_eq!(receiver.send(&send(&first, "d")).await.status, 200);
    server.wait_for_fetches(3).await;
    receiver.advance(61);
    within(async { while receiver.send(&send(&first, "e")).await.status != 401 {} }).await;
    assert_eq!(receiver.send(&send(&second, "f")).await.status, 200);
}

/// A key under the wrong id, a key of another curve, and a text that is not an id.
#[tokio::test]
async fn an_answer_of_plaid_that_is_not_the_key_is_a_503_and_a_forged_id_a_401() {
    let server = KeyServer::start().await;
    let (key, other) = (PlaidKey::new("kid-1"), PlaidKey::new("kid-2"));
    let receiver = Receiver::start(server.keys(), &authority("x").pem()).await;
    let curve = key.answer(None).replace("P-256", "P-384");
    for answer in [other.answer(None), curve, "{}".to_owned(), String::new()] {
        server.set("kid-1", 200, answer);
        assert_eq!(receiver.send(&key.request("a", receiver.now())).await.status, 503);
        receiver.advance(31);
    }
    let fetches = server.fetches();
    let odd = PlaidKey { kid: "kid/../1", pair: key.pair };
    assert_eq!(receiver.send(&odd.request("a", receiver.now())).await.status, 401);
    assert_eq!((server.fetches(), receiver.stored().await), (fetches, 0));
}
