//! TLS to endpoints is always verified.

use std::net::Ipv4Addr;
use std::sync::Arc;

use hapax_engine::{EndpointClient, SendErrorClass};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd,
};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

use super::{NO_CONTENT, Names, loopback_allowed, post, read_request};

/// An authority that the client trusts, and a server with a certificate of it.
struct Server {
    port: u16,
    root: CertificateDer<'static>,
    requests: mpsc::UnboundedReceiver<(Option<String>, String)>,
    _serving: JoinSet<()>,
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(DnType::CommonName, "Hapax test authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

fn certificate_for(host: &str) -> CertificateParams {
    CertificateParams::new([host.to_owned()]).unwrap()
}

/// A server whose certificate is made from `params` by an authority that the client trusts.
async fn server(params: CertificateParams) -> Server {
    let (authority, key) = (authority(), KeyPair::generate().unwrap());
    let certificate = params.signed_by(&key, &authority).unwrap().der().clone();
    start(certificate, &key, authority.der().clone()).await
}

async fn start(
    certificate: CertificateDer<'static>,
    key: &KeyPair,
    root: CertificateDer<'static>,
) -> Server {
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    // A server that prefers HTTP/2 must get HTTP/1.1.
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (heard, requests) = mpsc::unbounded_channel();
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let name = stream.get_ref().1.server_name().map(str::to_owned);
            let Some(request) = read_request(&mut stream).await else { continue };
            let _ = heard.send((name, request));
            let _ = stream.write_all(NO_CONTENT.as_bytes()).await;
            let _ = stream.shutdown().await;
        }
    });
    Server { port, root, requests, _serving: serving }
}

impl Server {
    fn client(&self, host: &str) -> EndpointClient {
        let names = Names::one(host, &["127.0.0.1"]);
        EndpointClient::with(loopback_allowed(), names, std::slice::from_ref(&self.root)).unwrap()
    }

    async fn refuses(&mut self, host: &str, text: &str) {
        let url = format!("https://{host}:{}/", self.port);
        let error = post(&self.client(host), &url).await.unwrap_err();
        assert_eq!(error.class, SendErrorClass::Tls, "{error}");
        assert!(error.text.contains(text), "{error}");
        assert!(!error.may_have_arrived);
        assert!(self.requests.try_recv().is_err(), "the server got a request");
    }
}

/// The good case: the name is in the handshake and in Host, although an address was connected to.
#[tokio::test]
async fn the_name_of_an_endpoint_is_used_for_tls_and_host() {
    let mut server = server(certificate_for("hook.example")).await;
    let client = server.client("hook.example");
    let url = format!("https://hook.example:{}/in", server.port);
    assert_eq!(post(&client, &url).await.unwrap().status, 204);
    let (name, request) = server.requests.recv().await.unwrap();
    assert_eq!(name.as_deref(), Some("hook.example"));
    assert!(request.starts_with("POST /in HTTP/1.1\r\n"), "{request}");
    assert!(request.contains(&format!("\r\nhost: hook.example:{}\r\n", server.port)), "{request}");
}

/// Tries an old, a future, a foreign and a self-made certificate.
#[tokio::test]
async fn a_certificate_that_is_not_valid_is_refused_before_anything_is_sent() {
    let mut expired = certificate_for("hook.example");
    expired.not_before = date_time_ymd(2020, 1, 1);
    expired.not_after = date_time_ymd(2021, 1, 1);
    server(expired).await.refuses("hook.example", "the certificate has expired").await;

    let mut future = certificate_for("hook.example");
    future.not_before = date_time_ymd(4000, 1, 1);
    server(future).await.refuses("hook.example", "is not valid yet").await;

    let foreign = certificate_for("other.example");
    server(foreign).await.refuses("hook.example", "is not valid for hook.example").await;

    let key = KeyPair::generate().unwrap();
    let own = certificate_for("hook.example").self_signed(&key).unwrap().der().clone();
    let mut own = start(own, &key, authority().der().clone()).await;
    own.refuses("hook.example", "no public certificate authority").await;
}

/// A server without TLS must not get the request in the clear.
#[tokio::test]
async fn a_server_without_tls_gets_nothing() {
    let names = Names::one("hook.example", &["127.0.0.1"]);
    let client = super::client(loopback_allowed(), &names);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut answering = JoinSet::new();
    answering.spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
    });
    let error = post(&client, &format!("https://hook.example:{port}/")).await.unwrap_err();
    assert_eq!(error.class, SendErrorClass::Tls, "{error}");
    assert!(error.text.contains("does not speak TLS"), "{error}");
}
