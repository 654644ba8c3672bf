//! The admission webhook: labelled pods get their datasets. It is asked only about pods that carry
//! the label, and fails closed for those: a training pod without its data is worth nothing.
//!
//! [`ask`] reads what the pod wants, [`inject`] makes the patch (both pure), [`serve`] speaks HTTPS,
//! [`certs`] and [`trust`] keep the certificates, [`users`] knows which pods were injected.

pub mod ask;
pub mod certs;
pub mod inject;
pub mod serve;
pub mod trust;
pub mod users;
