//! The webhook's own certificate authority. The leader keeps it in one Secret; every replica reads
//! that Secret. When the authority is replaced, the API server is first told to trust both, and the
//! serving certificate changes hands only later, so no admission fails in between.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use thiserror::Error;

/// How long an authority is good for; it is replaced after two thirds of that.
const AUTHORITY_LIFE: SignedDuration = SignedDuration::from_hours(24 * 365);
/// How long a serving certificate is good for; it is replaced after two thirds of that.
const LEAF_LIFE: SignedDuration = SignedDuration::from_hours(24 * 30);
/// How long the API server gets to learn of a new authority before it signs anything.
const SPREAD: SignedDuration = SignedDuration::from_mins(10);
/// Certificates begin this much in the past: clocks differ.
const SKEW: SignedDuration = SignedDuration::from_mins(5);

/// A certificate could not be made or read.
#[derive(Debug, Error)]
pub enum CertError {
    /// Signing failed.
    #[error("make a certificate")]
    Make(#[from] rcgen::Error),
    /// The time is out of range.
    #[error("compute the life of a certificate")]
    Time(#[from] k8s_openapi::jiff::Error),
    /// What is in the Secret is not a certificate.
    #[error("read the certificate {0}")]
    Read(&'static str),
}

/// What the Secret holds: PEM texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The authority that signs.
    pub authority: String,
    /// Its key.
    pub authority_key: String,
    /// The authority before, still trusted.
    pub old_authority: String,
    /// The serving certificate.
    pub leaf: String,
    /// Its key.
    pub leaf_key: String,
}

/// Keys of the Secret, in the order of the fields of [`Stored`].
pub const SECRET_KEYS: [&str; 5] = ["ca.crt", "ca.key", "old-ca.crt", "tls.crt", "tls.key"];

impl Stored {
    /// What the API server must trust.
    #[must_use]
    pub fn bundle(&self) -> String {
        format!("{}{}", self.authority, self.old_authority)
    }
}

/// What should be stored instead of `stored` at time `now`; `None` if it is good.
pub fn renew(
    stored: &Stored,
    names: &[String],
    now: Timestamp,
) -> Result<Option<Stored>, CertError> {
    let mut next = stored.clone();
    match life(&stored.authority, "ca.crt") {
        Err(_) => {
            next = Stored::default();
            (next.authority, next.authority_key) = make_authority(now)?;
        }
        Ok(life) if life.is_old(now) => {
            next.old_authority = stored.authority.clone();
            (next.authority, next.authority_key) = make_authority(now)?;
        }
        Ok(_) => {}
    }
    if !next.old_authority.is_empty()
        && life(&next.old_authority, "old-ca.crt").is_ok_and(|l| l.is_over(now))
    {
        next.old_authority.clear();
    }
    if needs_leaf(&next, now)? {
        (next.leaf, next.leaf_key) = make_leaf(&next, names, now)?;
    }
    Ok((next != *stored).then_some(next))
}

fn needs_leaf(next: &Stored, now: Timestamp) -> Result<bool, CertError> {
    let Ok(leaf) = life(&next.leaf, "tls.crt") else { return Ok(true) };
    let authority = life(&next.authority, "ca.crt")?;
    let spread = authority.start + SKEW + SPREAD <= now;
    let foreign = leaf.issuer != authority.subject;
    Ok(leaf.is_over(now) || spread && (leaf.is_old(now) || foreign))
}

struct Life {
    start: Timestamp,
    end: Timestamp,
    issuer: String,
    subject: String,
    common_name: String,
}

impl Life {
    fn is_old(&self, now: Timestamp) -> bool {
        let whole = self.end.as_second() - self.start.as_second();
        now.as_second() - self.start.as_second() > whole / 3 * 2
    }

    fn is_over(&self, now: Timestamp) -> bool {
        now >= self.end
    }
}

fn life(pem: &str, what: &'static str) -> Result<Life, CertError> {
    let (_, block) =
        x509_parser::pem::parse_x509_pem(pem.as_bytes()).map_err(|_| CertError::Read(what))?;
    let certificate = block.parse_x509().map_err(|_| CertError::Read(what))?;
    let validity = certificate.validity();
    let first = certificate.subject().iter_common_name().next();
    let common_name = first.and_then(|name| name.as_str().ok()).map(str::to_owned);
    Ok(Life {
        start: Timestamp::from_second(validity.not_before.timestamp())?,
        end: Timestamp::from_second(validity.not_after.timestamp())?,
        issuer: certificate.issuer().to_string(),
        subject: certificate.subject().to_string(),
        common_name: common_name.unwrap_or_default(),
    })
}

fn params(
    common_name: &str,
    now: Timestamp,
    life: SignedDuration,
) -> Result<CertificateParams, CertError> {
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    params.distinguished_name = name;
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let since =
        |at: Timestamp| Duration::from_secs(u64::try_from(at.as_second()).unwrap_or_default());
    params.not_before = epoch + since(now.checked_sub(SKEW)?);
    params.not_after = epoch + since(now.checked_add(life)?);
    Ok(params)
}

fn make_authority(now: Timestamp) -> Result<(String, String), CertError> {
    let key = KeyPair::generate()?;
    // The name tells authorities apart: a leaf knows its authority by it.
    let params = authority_params(&format!("lampyris webhook CA {}", now.as_second()), now)?;
    Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
}

fn authority_params(name: &str, now: Timestamp) -> Result<CertificateParams, CertError> {
    let mut params = params(name, now, AUTHORITY_LIFE)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    Ok(params)
}

fn make_leaf(
    stored: &Stored,
    names: &[String],
    now: Timestamp,
) -> Result<(String, String), CertError> {
    let authority_key = KeyPair::from_pem(&stored.authority_key)?;
    let name = life(&stored.authority, "ca.crt")?.common_name;
    let issuer = Issuer::new(authority_params(&name, now)?, authority_key);
    let key = KeyPair::generate()?;
    let mut params = params("lampyris webhook", now, LEAF_LIFE)?;
    params.subject_alt_names = CertificateParams::new(names.to_vec())?.subject_alt_names;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    Ok((params.signed_by(&key, &issuer)?.pem(), key.serialize_pem()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day(n: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + n * 86_400).unwrap()
    }

    fn names() -> Vec<String> {
        vec!["lampyris-webhook.lampyris-system.svc".to_owned()]
    }

    fn next(stored: &Stored, now: Timestamp) -> Stored {
        renew(stored, &names(), now).unwrap().unwrap_or_else(|| stored.clone())
    }

    /// Whether a client that trusts `bundle` would accept the serving certificate.
    fn trusted(stored: &Stored) -> bool {
        let leaf = life(&stored.leaf, "leaf").unwrap();
        [&stored.authority, &stored.old_authority]
            .iter()
            .filter(|pem| !pem.is_empty())
            .any(|pem| life(pem, "ca").unwrap().subject == leaf.issuer)
    }

    #[test]
    fn an_empty_secret_is_filled_and_then_left_alone() {
        let first = next(&Stored::default(), day(0));
        assert!(trusted(&first));
        assert_eq!(renew(&first, &names(), day(1)).unwrap(), None);
        assert!(rustls_accepts(&first));
    }

    #[test]
    fn a_serving_certificate_is_replaced_long_before_it_ends() {
        let first = next(&Stored::default(), day(0));
        assert_eq!(renew(&first, &names(), day(19)).unwrap(), None);
        let second = next(&first, day(21));
        assert_ne!(second.leaf, first.leaf);
        assert_eq!(second.authority, first.authority);
    }

    #[test]
    fn through_the_change_of_an_authority_some_trusted_one_has_signed_the_leaf() {
        let mut stored = next(&Stored::default(), day(0));
        let mut authorities = std::collections::BTreeSet::new();
        for n in 0..1_000 {
            let before = stored.clone();
            stored = next(&stored, day(n));
            assert!(trusted(&stored), "day {n}");
            // What the API server trusted yesterday still fits what is served today.
            let leaf = life(&stored.leaf, "leaf").unwrap();
            let known = [&before.authority, &before.old_authority];
            let fits = known.iter().filter(|pem| !pem.is_empty());
            assert!(
                fits.clone().any(|pem| life(pem, "ca").unwrap().subject == leaf.issuer),
                "day {n}"
            );
            authorities.insert(stored.authority.clone());
        }
        assert!(authorities.len() >= 3, "{}", authorities.len());
    }

    #[test]
    fn rubbish_in_the_secret_is_replaced() {
        let rubbish =
            Stored { authority: "x".to_owned(), leaf: "y".to_owned(), ..Stored::default() };
        assert!(trusted(&next(&rubbish, day(0))));
    }

    fn rustls_accepts(stored: &Stored) -> bool {
        super::super::serve::certified_key(stored).is_ok()
    }
}
