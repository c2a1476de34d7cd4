//! Temporary certificates for servers on loopback, each from a new authority.

use std::io;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

/// PEM texts: the authority to trust, and the server's certificate and key.
pub(crate) struct Issued {
    pub(crate) authority: String,
    pub(crate) certificate: String,
    pub(crate) key: String,
}

/// A certificate for `localhost` and `127.0.0.1`. The certificate is not self-signed: clients refuse an
/// authority as a server certificate.
pub(crate) fn issue() -> io::Result<Issued> {
    make().map_err(io::Error::other)
}

fn make() -> Result<Issued, rcgen::Error> {
    let mut authority = CertificateParams::new(Vec::new())?;
    // The authority has another name than the server. Otherwise the server's certificate would look
    // self-signed.
    authority.distinguished_name.push(DnType::CommonName, "Hapax test authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;
    let server = CertificateParams::new(["localhost".to_owned(), "127.0.0.1".to_owned()])?;
    let key = KeyPair::generate()?;
    let certificate = server.signed_by(&key, &authority)?;
    Ok(Issued {
        authority: authority.pem(),
        certificate: certificate.pem(),
        key: key.serialize_pem(),
    })
}
