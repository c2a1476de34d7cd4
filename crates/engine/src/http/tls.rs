//! TLS for a listener, from PEM files. A renewed certificate is taken over without a restart.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio_rustls::rustls;
pub use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::CryptoProvider;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;

/// A certificate and its key, as read from their files.
#[derive(Debug)]
pub struct Certificate {
    provider: Arc<CryptoProvider>,
    current: ArcSwap<CertifiedKey>,
}

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or contains no certificate or key.
    #[error("reading {}: {problem}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The error.
        problem: pem::Error,
    },
    /// The chain is empty, or the key does not belong to it.
    #[error("using {} with {}: {problem}", cert.display(), key.display())]
    Pair {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The error.
        problem: rustls::Error,
    },
}

impl Certificate {
    /// Reads both files.
    pub fn load(cert: &Path, key: &Path) -> Result<Arc<Self>, TlsError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let current = ArcSwap::from(read(cert, key, &provider)?);
        Ok(Arc::new(Self { provider, current }))
    }

    /// Uses the certificate and the key of `newer` for every handshake from now on.
    pub fn replace_with(&self, newer: &Self) {
        self.current.store(newer.current.load_full());
    }

    /// The TLS settings of a listener: TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1.
    pub fn server_config(self: &Arc<Self>) -> Result<Arc<ServerConfig>, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(self.provider.clone())
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.load_full())
    }
}

fn read(cert: &Path, key: &Path, provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, TlsError> {
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect)
        .map_err(|problem| TlsError::File { file: cert.to_owned(), problem })?;
    if chain.is_empty() {
        let problem = pem::Error::Io(io::Error::other("no certificate in it"));
        return Err(TlsError::File { file: cert.to_owned(), problem });
    }
    let private = PrivateKeyDer::from_pem_file(key)
        .map_err(|problem| TlsError::File { file: key.to_owned(), problem })?;
    let pair = CertifiedKey::from_der(chain, private, provider).map_err(|problem| {
        TlsError::Pair { cert: cert.to_owned(), key: key.to_owned(), problem }
    })?;
    Ok(Arc::new(pair))
}
