from hypothesis import settings

# Machines that run the tests differ in speed and are shared; how long an example takes says nothing of the policy.
settings.register_profile("policy", deadline=None, max_examples=60)
settings.load_profile("policy")
