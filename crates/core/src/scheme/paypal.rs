//! PayPal: RSA by a certificate that chains to the roots and names paypal.com. The certificate is configured,
//! or fetched from the address in PAYPAL-CERT-URL, which must be one of PayPal's own.
//!
//! Only a CRC-32 of the body is signed, and another body with the same CRC-32 is easily made. So such an
//! event is a hint to fetch the object, and not the object.

use aws_lc_rs::signature::{ParsedPublicKey, RSA_PKCS1_2048_8192_SHA256};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use jiff::Timestamp;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage, anchor_from_trusted_cert};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::keys::{self, ExpiringKey};
use super::recipe::TimeForm;
use super::sender_key::{self, FetchedKey, KeyRequest, SenderKey, SenderKeyError};
use super::{
    Authentic, SchemeError, SchemeVerifier, SignError, Signed, SignedContent, expired,
    first_missing, needed, not_fetched, only_the_sender, param, time,
};
use crate::arrival::Arrival;
use crate::key::KeyHash;
use crate::source::SourceSpec;
use crate::verify::Refusal;

const ID: &str = "paypal-transmission-id";
const TIME: &str = "paypal-transmission-time";
const SIGNATURE: &str = "paypal-transmission-sig";
const ALGORITHM: &str = "paypal-auth-algo";
const CERT_URL: &str = "paypal-cert-url";

/// The hosts that PayPal publishes its certificates at.
const CERT_HOSTS: [&str; 4] =
    ["api.paypal.com", "api-m.paypal.com", "api.sandbox.paypal.com", "api-m.sandbox.paypal.com"];

/// The path of a certificate, before its id.
const CERT_PATH: &str = "v1/notifications/certs/";

/// The most certificates of one chain: more than any public authority uses.
const CHAIN_MAX: usize = 8;

/// The webhook ids that the signed content may contain, and what certificates are checked against.
pub(super) struct PayPalVerifier {
    webhook_ids: Vec<ExpiringKey<String>>,
    /// The certificate, if it is not fetched.
    configured: Option<Certificate>,
    roots: Vec<TrustAnchor<'static>>,
    /// A hash of the configured roots.
    roots_hash: KeyHash,
}

/// A certificate of PayPal that chains to the roots.
pub(super) struct Certificate {
    key: ParsedPublicKey,
    valid_from: i64,
    valid_to: i64,
}

/// A hash of each webhook id of a source.
pub(super) fn webhook_id_hashes(spec: &SourceSpec) -> Vec<KeyHash> {
    let hash = |id: &str| KeyHash::of(b"paypal webhook", [id.as_bytes()]);
    match spec.secrets.as_slice() {
        [] => spec.params.get("webhook_id").map(|id| hash(id)).into_iter().collect(),
        ids => ids.iter().map(|id| hash(id.secret.expose())).collect(),
    }
}

impl PayPalVerifier {
    pub(super) fn compile(spec: &SourceSpec) -> Result<Self, SchemeError> {
        let webhook_ids = match spec.secrets.is_empty() {
            true => {
                vec![ExpiringKey::forever(
                    param(spec, "webhook_id", "the id of the webhook")?.to_owned(),
                )]
            }
            false => keys::prepare(&spec.secrets, |text| Ok(text.to_owned()))?,
        };
        let given = |name| spec.params.get(name).map(String::as_str);
        let ca_pem = given("ca_pem");
        let roots = match ca_pem {
            Some(pem) => anchors(pem).map_err(|problem| bad("ca_pem", problem))?,
            None => webpki_roots::TLS_SERVER_ROOTS.to_vec(),
        };
        let roots_hash = KeyHash::of(b"roots", [ca_pem.unwrap_or_default().as_bytes()]);
        let read = |pem: &str| Certificate::read(pem.as_bytes(), &roots, ChainAt::ItsStart);
        let configured = given("cert_pem")
            .map(|pem| read(pem).map_err(|problem| bad("cert_pem", problem)))
            .transpose()?;
        Ok(Self { webhook_ids, configured, roots, roots_hash })
    }

    /// Checks the signature with the key of `certificate`.
    fn check(
        &self,
        arrival: &Arrival,
        certificate: &Certificate,
        now: Timestamp,
    ) -> Result<Authentic, Refusal> {
        let wrong = |problem: &str| Refusal::Signature(problem.to_owned());
        if needed(arrival, ALGORITHM)? != "SHA256withRSA" {
            return Err(wrong("the algorithm is not SHA256withRSA"));
        }
        if !(certificate.valid_from..=certificate.valid_to).contains(&now.as_second()) {
            return Err(wrong("the certificate is not valid now"));
        }
        let id = needed(arrival, ID)?;
        let stamp = needed(arrival, TIME)?;
        let signature = needed(arrival, SIGNATURE)?;
        let signed_at = time::parse(TimeForm::Rfc3339, &stamp)
            .ok_or_else(|| wrong("the timestamp is not well-formed"))?;
        let signature =
            STANDARD.decode(&*signature).map_err(|_| wrong("the signature is not well-formed"))?;
        let crc = crc32(&arrival.body);
        let mut tried = 0;
        for (secret, webhook_id) in keys::active(&self.webhook_ids, now) {
            tried += 1;
            let content = format!("{id}|{stamp}|{webhook_id}|{crc}");
            if certificate.key.verify_sig(content.as_bytes(), &signature).is_ok() {
                return Ok(Authentic { signed_at: Some(signed_at), secret });
            }
        }
        match tried {
            0 => Err(expired()),
            _ => Err(wrong(
                "the signature was not made with the certificate's key, or is for another webhook id",
            )),
        }
    }
}

/// The time at which a chain must be valid.
#[derive(Clone, Copy)]
enum ChainAt {
    /// At the start of the certificate's validity: a configured chain is checked once.
    ItsStart,
    Now(Timestamp),
}

impl Certificate {
    /// Reads a certificate with its intermediates after it, and checks its owner and its chain. Every request
    /// checks that the certificate has not expired.
    fn read(
        pem: &[u8],
        roots: &[TrustAnchor<'_>],
        chain_at: ChainAt,
    ) -> Result<Self, &'static str> {
        let chain = certificates(pem)?;
        let leaf = chain.first().ok_or("holds no certificate")?;
        let (_, parsed) = X509Certificate::from_der(leaf).map_err(|_| "is not a certificate")?;
        let names_paypal = parsed
            .subject()
            .iter_common_name()
            .filter_map(|name| name.as_str().ok())
            .any(|name| name.ends_with(".paypal.com"));
        if !names_paypal {
            return Err("is not a certificate of paypal.com");
        }
        let valid_from = parsed.validity().not_before.timestamp();
        let valid_to = parsed.validity().not_after.timestamp();
        let at = match chain_at {
            ChainAt::ItsStart => valid_from,
            ChainAt::Now(now) => now.as_second(),
        };
        check_chain(leaf, &chain[1..], roots, at)?;
        let key = &parsed.public_key().subject_public_key.data;
        let key = ParsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &key[..])
            .map_err(|_| "holds no RSA key of 2048 bits or more")?;
        Ok(Self { key, valid_from, valid_to })
    }
}

fn check_chain(
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    roots: &[TrustAnchor<'_>],
    at: i64,
) -> Result<(), &'static str> {
    let leaf = EndEntityCert::try_from(leaf).map_err(|_| "is not a certificate")?;
    let at = std::time::Duration::from_secs(u64::try_from(at).unwrap_or_default());
    leaf.verify_for_usage(
        webpki::ALL_VERIFICATION_ALGS,
        roots,
        intermediates,
        UnixTime::since_unix_epoch(at),
        KeyUsage::server_auth(),
        None,
        None,
    )
    .map(|_| ())
    .map_err(|_| "does not chain to the roots, or the chain is not valid now")
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, &'static str> {
    let all = CertificateDer::pem_slice_iter(pem)
        .take(CHAIN_MAX)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| "is not PEM")?;
    if all.is_empty() { Err("holds no certificate") } else { Ok(all) }
}

fn anchors(pem: &str) -> Result<Vec<TrustAnchor<'static>>, &'static str> {
    let all = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| "is not PEM")?;
    if all.is_empty() {
        return Err("holds no certificate");
    }
    let anchor = |root: &CertificateDer<'_>| anchor_from_trusted_cert(root).map(|it| it.to_owned());
    all.iter().map(anchor).collect::<Result<_, _>>().map_err(|_| "is not a certificate")
}

/// The id of a certificate at one of PayPal's own addresses. Every other spelling of a URL is refused, since
/// another parser could read another host in it.
fn certificate_id(url: &str) -> Option<&str> {
    let (host, path) = url.strip_prefix("https://")?.split_once('/')?;
    let id = path.strip_prefix(CERT_PATH)?;
    (CERT_HOSTS.contains(&host) && sender_key::is_key_name(id)).then_some(id)
}

fn bad(name: &str, problem: &str) -> SchemeError {
    SchemeError::new(
        "params",
        format!("{name} {problem}"),
        "cert_pem is the file at PAYPAL-CERT-URL, and is fetched from there without it; ca_pem are the roots \
         that it chains to, by default the public ones",
    )
}

impl SchemeVerifier for PayPalVerifier {
    fn missing<'a>(&'a self, headers: &HeaderMap) -> Option<&'a str> {
        let fetched = self.configured.is_none().then_some(CERT_URL);
        first_missing(headers, [SIGNATURE, ID, TIME, ALGORITHM].into_iter().chain(fetched))
    }

    fn authenticate(&self, arrival: &Arrival, now: Timestamp) -> Result<Authentic, Refusal> {
        match &self.configured {
            Some(certificate) => self.check(arrival, certificate, now),
            None => Err(not_fetched("cert_pem and ca_pem")),
        }
    }

    fn key_request(
        &self,
        headers: &HeaderMap,
        _now: Timestamp,
    ) -> Result<Option<KeyRequest>, Refusal> {
        if self.configured.is_some() {
            return Ok(None);
        }
        let url = sender_key::only(headers, CERT_URL)?;
        let id = certificate_id(url).ok_or_else(|| {
            Refusal::Signature("the certificate's address is not one of PayPal's".to_owned())
        })?;
        Ok(Some(KeyRequest {
            id: KeyHash::of(b"paypal", [url.as_bytes(), &self.roots_hash.0]),
            url: url.to_owned(),
            body: None,
            name: format!("certificate {id}"),
        }))
    }

    fn read_key(
        &self,
        _request: &KeyRequest,
        answer: &[u8],
        now: Timestamp,
    ) -> Result<SenderKey, SenderKeyError> {
        let read = Certificate::read(answer, &self.roots, ChainAt::Now(now));
        read.map(|certificate| SenderKey(FetchedKey::Certificate(certificate)))
            .map_err(|problem| SenderKeyError(format!("the certificate {problem}")))
    }

    fn authenticate_with_key(
        &self,
        arrival: &Arrival,
        key: &SenderKey,
        now: Timestamp,
    ) -> Result<Authentic, Refusal> {
        match &key.0 {
            FetchedKey::Certificate(certificate) => self.check(arrival, certificate, now),
            FetchedKey::Jwk(_) => Err(not_fetched("cert_pem and ca_pem")),
        }
    }

    fn sign(&self, _request: &Arrival, _id: &str, _now: Timestamp) -> Result<Signed, SignError> {
        Err(only_the_sender("PayPal"))
    }

    /// Many bodies share a checksum, so the transmission identifies the signed content. A transmission
    /// carries one event.
    fn signed_content(&self, arrival: &Arrival) -> Result<SignedContent, Refusal> {
        let (id, stamp) = (needed(arrival, ID)?, needed(arrival, TIME)?);
        Ok(SignedContent::whole([id.as_bytes(), b"|", stamp.as_bytes()]))
    }
}

/// CRC-32 as in zip and PNG.
fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut at = 0;
        while at < 256 {
            let mut value = at as u32;
            let mut bit = 0;
            while bit < 8 {
                value = if value & 1 == 1 { 0xedb8_8320 ^ (value >> 1) } else { value >> 1 };
                bit += 1;
            }
            table[at] = value;
            at += 1;
        }
        table
    };
    !bytes
        .iter()
        .fold(!0, |crc, byte| TABLE[((crc ^ u32::from(*byte)) & 255) as usize] ^ (crc >> 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Each address is almost one of PayPal's: another parser may read another host in it.
    #[test]
    fn a_certificate_is_fetched_from_paypal_and_from_nowhere_else() {
        let good = "https://api.paypal.com/v1/notifications/certs/CERT-360caa42-fca2a594-7a8abba8";
        assert_eq!(certificate_id(good), Some("CERT-360caa42-fca2a594-7a8abba8"));
        let sandbox = good.replace("api.", "api.sandbox.");
        assert!(certificate_id(&sandbox).is_some());
        let long = format!("{good}{}", "a".repeat(128));
        for forged in [
            "",
            "https://api.paypal.com",
            "https://api.paypal.com/v1/notifications/certs/",
            "https://api.paypal.com/v1/notifications/certs/../../oauth2/token",
            "https://api.paypal.com/v1/oauth2/token",
            "https://api.paypal.com:443/v1/notifications/certs/CERT-1",
            "https://api.paypal.com@evil.example/v1/notifications/certs/CERT-1",
            "https://evil.example/v1/notifications/certs/CERT-1",
            "https://evil.example/api.paypal.com/v1/notifications/certs/CERT-1",
            "https://api.paypal.com.evil.example/v1/notifications/certs/CERT-1",
            "https://evil.paypal.com/v1/notifications/certs/CERT-1",
            "https://api.paypal.com\\@evil.example/v1/notifications/certs/CERT-1",
            "https://api.paypal.com/v1/notifications/certs/CERT-1?next=https://evil.example",
            "https://api.paypal.com/v1/notifications/certs/CERT-1#",
            "https://api.paypal.com/v1/notifications/certs/CERT%2d1",
            "https://API.paypal.com/v1/notifications/certs/CERT-1",
            " https://api.paypal.com/v1/notifications/certs/CERT-1",
            "http://api.paypal.com/v1/notifications/certs/CERT-1",
            &long,
        ] {
            assert_eq!(certificate_id(forged), None, "{forged}");
        }
    }

    #[test]
    fn the_checksum_is_crc_32_as_in_zip() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }
}
