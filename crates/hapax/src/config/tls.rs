//! `[tls]`: the certificate and key of the public side, loaded and matched at start, so that a wrong
//! file is a config error and not a broken handshake later.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::Reading;
use super::document::{Entry, Section};
use super::problem::Complaint;

/// TLS for the public side.
#[derive(Debug, Clone)]
pub(crate) struct Tls {
    /// Ready for a rustls acceptor: HTTP/2 and HTTP/1.1.
    pub(crate) server: Arc<ServerConfig>,
}

impl Reading<'_> {
    /// Reads `[tls]`, where there is one.
    pub(super) fn tls(&mut self, root: &Section<'_>) -> Option<Tls> {
        let section = root.get("tls")?.section(&mut self.problems)?;
        section.expect(&["cert", "key"], &[], &mut self.problems);
        let cert = self.pem_file(&section, "cert");
        let key = self.pem_file(&section, "key");
        let ((cert_entry, cert), (key_entry, key)) = (cert?, key?);
        let chain = match certificates(&cert) {
            Ok(chain) => chain,
            Err(complaint) => {
                cert_entry.complain(complaint, &mut self.problems);
                return None;
            }
        };
        match private_key(&key).and_then(|key| server(chain, key)) {
            Ok(server) => Some(Tls { server: Arc::new(server) }),
            Err(complaint) => {
                key_entry.complain(complaint, &mut self.problems);
                None
            }
        }
    }

    fn pem_file<'d>(&mut self, section: &Section<'d>, name: &str) -> Option<(Entry<'d>, PathBuf)> {
        let Some(entry) = section.get(name) else {
            let complaint = Complaint::new(
                format!("has no {name}"),
                "TLS needs both cert and key, as PEM files",
            );
            section.complain(complaint, &mut self.problems);
            return None;
        };
        let text = entry.text(&mut self.problems)?;
        let path = PathBuf::from(text.strip_prefix("file:").unwrap_or(text));
        self.watched.push(path.clone());
        Some((entry, path))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Complaint> {
    let cannot = |why: String| {
        Complaint::new(
            format!("cannot read certificates from {}: {why}", path.display()),
            "a PEM file: the server's certificate first, then the chain",
        )
    };
    let chain: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| cannot(error.to_string()))?;
    if chain.is_empty() { Err(cannot("there is none in it".to_owned())) } else { Ok(chain) }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, Complaint> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| {
        Complaint::new(
            format!("cannot read a private key from {}: {error}", path.display()),
            "a PEM file with one private key: PKCS#8, PKCS#1 or SEC1",
        )
    })
}

fn server(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ServerConfig, Complaint> {
    let refused = |error: rustls::Error| {
        Complaint::new(
            format!("certificate and key cannot be used together: {error}"),
            "the key must be that of the first certificate in the file",
        )
    };
    let mut server = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(refused)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(refused)?;
    server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(server)
}
