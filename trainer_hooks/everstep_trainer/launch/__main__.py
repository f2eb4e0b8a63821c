from everstep_trainer.launch.command import main

if __name__ == "__main__":
    main()
