"""Jars with which Spark reads tables of a lakehouse and object stores, by the release of Spark that they are for."""

import pyspark

# Of each release of Spark: its newest Delta Lake and Iceberg among those that were tried.
_DELTA = {
    "4.1": {
        "io.delta:delta-spark_4.1_2.13:4.3.1": "ebf35a4383f0a653c3ee3c7882c0edcac2f846be31ac61af4b96ccfaaf36c171",
        "io.delta:delta-storage:4.3.1": "577c12c7e371be4c041714fb48e88ad86e3c3512beea2bdaffbe7a4debf79718",
        "io.delta:delta-kernel-api:4.3.1": "b081b818d6f5686c7d6406588af72c9f8baf6765a41ada8197364aef90a260e8",
        "io.delta:delta-kernel-defaults:4.3.1": "27471cca7dd7a36289af2c8d52d2babb37e9e5a13cdaaea76730120f4c72e62f",
        "io.delta:delta-kernel-unitycatalog:4.3.1": "a288342b7e53da34a608a1a227c8109aa4681fcb582da499ed19347f2193362b",
        "io.unitycatalog:unitycatalog-client:0.5.0": "9de6812122b411e74ee06c831dac5ccd5f87d69002c29170a37a8bce5e503615",
        "io.unitycatalog:unitycatalog-hadoop:0.5.0": "baca7b2928afe2a1b1789b423ab817d5d4165218999a10ebeab4a8712683beb5",
    },
}
_ICEBERG = {
    "4.1": {
        "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0": (
            "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82"
        ),
    },
}
# ``s3a://``. Instead of AWS' bundle of all its clients (686 MB), those that Hadoop takes (19 MB), in the same version.
_AWS = {
    "annotations": "6f36bd87155d1dd85d6efbdd29e532e3759a022211feb71affebee1aa34f04b8",
    "apache-client": "6eade21b482724ed0a4613eaa95d20e47e7a81304bd28538ac427fece94a7740",
    "arns": "c63cc29f76a8527e9e10b621703163df541dc5cb315508dc2898518602c75380",
    "auth": "6b601323004833fb4a857ffc95db4795e0e6320eb93e64b1246c655c9ff04994",
    "aws-core": "fdb5fc8f1a48d97fa7d04d3460fb42f6973c7b1bbe1b9d317871ef0162bcb623",
    "aws-query-protocol": "9b4cf9b78977cc9f5b4ceae9c435dedbde6a055a0f8d9e053eaca945715e2a9f",
    "aws-xml-protocol": "4f59176da2522c357b1993e4a890fde529f12f365795ef86269bde4a3984cd0d",
    "checksums": "94464af4374d08ecf33ca06ed4d03e1615529e547726e26b56abacefbeee7948",
    "checksums-spi": "88b5af85ac2d3c862be8856be4e683ab31932e4a5a3c1c45af864d2671ac7cec",
    "crt-core": "2c6aaa17bf9ccbb9d962dded4351e73decb197e3c5519970e0dae17e05d3df62",
    "endpoints-spi": "ef02441bda916959b8341290b49c68cc35538e1ad6f8629b75d8334dc6653e00",
    "http-auth": "3ec933a06e751a05e195eb3589209e23c44e1897263b6fcae34ef4cc63cd4491",
    "http-auth-aws": "c4acb92fdec90bfd9b67bfab8e41b69cd152c03cacc10281a8ab464791856e01",
    "http-auth-aws-eventstream": "709107552f302be3fa9e05969a3779f5c0f07fb809e6fa1fa571a6f0c61326dd",
    "http-auth-spi": "4495463406bb98eb136f2c3f3604ed5f08ec9974ebc3f34f2121b20679f61d5c",
    "http-client-spi": "728be89b2a07b595edb0adee3a2cbbbdd4cb1f4caddde0d08c3979fe2620dedb",
    "identity-spi": "188d73db7d4e2361654bc3c5a1b3eaeb445d0500fb012cc46c5d67975adf97bf",
    "json-utils": "80d67a6bb3e7eb49c7d4b6e4ba4c1463ed7da0192b795158328602dc131c5ecc",
    "metrics-spi": "c2a4ee90a21081317e2e6eba0c414d05d3d518aed2f86b1c1710a7367b450487",
    "netty-nio-client": "b82f8b33e5c85273a47da45ede884d7ccb31c9c2f69e6910a76c5c48fa1275dc",
    "profiles": "0f4ef7ca72ccd80dd49ebeaf7f3ce60a7d7a00da59a91aeeae6e91052bbacbd8",
    "protocol-core": "f2532eca6ba2142fe4821d5decb03c83a3e15dc8bfae2240e7f2efa75f9868b5",
    "regions": "77eae87b34ce96ecdf916a9bc06684dbeafcb6d38ef0513285fa5d5d6d41f5ca",
    "retries": "f99fb2f8c66d7e859955b3542d3af8f9de8f23a21d5e3250f0f2c5f18487e469",
    "retries-spi": "668638751d059c527ddd41ffa4dcebe36a7c14860ed56776df09b861c14dc7dd",
    "s3": "f23532c5223be9b0bfec0d72837ed09ed34dbdf8022818ba145b20076a78b4bc",
    "s3-transfer-manager": "0eec78870b3d0abc509a847072cf963cb2ae6e360dc6161a9449b3398c470476",
    "sdk-core": "fa559a4ce598852f3519c8f3b36250f583b0858a7611eedc4a81997778c617f4",
    "sts": "8d0f7816d3f96e3f00249f5d054d926e939a104bcf9ef57676ee0b16c59684d2",
    "third-party-jackson-core": "32f4252c6c2df8f3a4aff885e6dc77024ad6b4cb48455d07b461ec30c41643ea",
    "utils": "642aeef536a071668f0b772f05f9d21573abf6955e7b6fb5fdb893760cca10e8",
    "utils-lite": "e004806def5e22ec98edc48a133ff3317166255e1ba29d93d129e9fdfa64a7be",
}
_S3A = {
    "4.3": {
        "org.apache.hadoop:hadoop-aws:3.5.0": "66bd9eefb938b1a1657487324b63c13df2d8b17164a1dd24e0ef37b905bc5baa",
        "org.reactivestreams:reactive-streams:1.0.4": (
            "f75ca597789b3dac58f61857b9ac2e1034a68fa672db35055a8fb4509e325f28"
        ),
        "org.wildfly.openssl:wildfly-openssl:2.2.5.Final": (
            "71fb7932f99a727edb23c5a2cb8c6855ac7196fad41aa0669b3998e277165154"
        ),
        "software.amazon.eventstream:eventstream:1.0.1": (
            "0c37d8e696117f02c302191b8110b0d0eb20fa412fce34c3a269ec73c16ce822"
        ),
        "software.amazon.s3.analyticsaccelerator:analyticsaccelerator-s3:1.3.1": (
            "4959a9747cbb479c73c3ffbcd479bee5b014f8b2880994585a8693fb9d24675e"
        ),
        **{f"software.amazon.awssdk:{name}:2.35.4": checksum for name, checksum in _AWS.items()},
    },
}
_KINDS = {"Delta Lake": _DELTA, "Iceberg": _ICEBERG, "Hadoop's S3A": _S3A}


class NoReleaseError(Exception):
    """There is no release for the Spark that is installed, or none that was tried; the text says which there are."""


def lakehouse_jars(kind):
    """Returns the checksums of what Spark needs for one kind, for `maven_jars.fetch_jars`.

    Raises:
        NoReleaseError: There is none for the Spark that is installed.
    """
    spark = ".".join(pyspark.__version__.split(".")[:2])
    known = _KINDS[kind]
    if spark not in known:
        raise NoReleaseError(f"{kind} was tried with Spark {', '.join(known)}, and has none here for Spark {spark}")
    return known[spark]
