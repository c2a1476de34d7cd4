//! TLS to the server: `sslmode` and `sslrootcert` with the meaning that PostgreSQL's own clients
//! give them.

use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

/// The values of `sslmode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TlsMode {
    /// Not encrypted.
    Disable,
    /// Encrypted if the server supports it.
    Prefer,
    /// Encrypted; any certificate is accepted, unless trusted certificates are configured.
    Require,
    /// Encrypted, with a certificate that is signed by a trusted one.
    VerifyCa,
    /// Encrypted, with a certificate that is signed by a trusted one and names this host.
    VerifyFull,
}

impl TlsMode {
    pub(super) fn from_word(word: &str) -> Option<Self> {
        match word {
            "disable" => Some(Self::Disable),
            "allow" | "prefer" => Some(Self::Prefer),
            "require" => Some(Self::Require),
            "verify-ca" => Some(Self::VerifyCa),
            "verify-full" => Some(Self::VerifyFull),
            _unknown => None,
        }
    }
}

/// The TLS configuration of a connection; `None` for an unencrypted one. The error is a text.
pub(super) fn client(mode: TlsMode, roots: Option<&Path>) -> Result<Option<ClientConfig>, String> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier: Arc<dyn ServerCertVerifier> = match (mode, roots) {
        (TlsMode::Disable, _) => return Ok(None),
        (TlsMode::VerifyCa | TlsMode::VerifyFull, None) => {
            return Err("sslmode = verify-ca or verify-full needs sslrootcert, a file of trusted \
                        certificates"
                .to_owned());
        }
        (TlsMode::Prefer | TlsMode::Require, None) => {
            Arc::new(AnyCertificate { provider: Arc::clone(&provider) })
        }
        (TlsMode::VerifyFull, Some(roots)) => trusting(roots, &provider)?,
        (TlsMode::Prefer | TlsMode::Require | TlsMode::VerifyCa, Some(roots)) => {
            Arc::new(AnyName { inner: trusting(roots, &provider)? })
        }
    };
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    Ok(Some(config))
}

fn trusting(
    roots: &Path,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>, String> {
    let failure = |why: String| format!("sslrootcert {}: {why}", roots.display());
    let mut store = RootCertStore::empty();
    for cert in CertificateDer::pem_file_iter(roots).map_err(|error| failure(error.to_string()))? {
        let cert = cert.map_err(|error| failure(error.to_string()))?;
        store.add(cert).map_err(|error| failure(error.to_string()))?;
    }
    if store.is_empty() {
        return Err(failure("holds no certificate".to_owned()));
    }
    WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::clone(provider))
        .build()
        .map_err(|error| failure(error.to_string()))
}

/// Accepts any certificate whose key the server holds: protects only against passive eavesdropping.
#[derive(Debug)]
struct AnyCertificate {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies the certificate but not the name in it.
#[derive(Debug)]
struct AnyName {
    inner: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.inner.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            answer => answer,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
